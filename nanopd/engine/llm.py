"""Frontend: all that needs a tokenizer, from prompts to requests and from tokens to text. LLM: the offline interface.

The front end does not know where its engine core is: the `LLM` below has it in its own process and calls `step`, the
server (serve/api.py) has it in another, and is sent what `step` returned.

A program written for vLLM's `LLM` and `SamplingParams` changes an import. Underneath, `add_request`, `step` and
`abort_requests` are there for whoever wants to see tokens as they come.
"""

import dataclasses
import hashlib
import itertools
import logging
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from nanopd.config import EngineConfig, SamplingParams, UserError, require
from nanopd.connector.protocol import KVTransferParams
from nanopd.core.output import EngineCoreOutput, SchedulerStats, TokenLogprobs
from nanopd.engine.detokenizer import Detokenizer
from nanopd.models.tokenizer import load_tokenizer
from nanopd.request import Request, RequestMetrics, check_length

if TYPE_CHECKING:
    from nanopd.engine.core import EngineCore
    from nanopd.engine.process import EngineClient

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | dict[str, Any]
"""Text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}, with {"cache_salt": text} if wanted."""

Params = SamplingParams | Sequence[SamplingParams] | None
Chat = Sequence[dict[str, str]]
Transfer = KVTransferParams | None

# Options of vLLM that mean nothing here: those with a value must have it, the others are ignored with a warning.
_VLLM_ONLY: dict[str, Any] = {"tensor_parallel_size": 1, "trust_remote_code": False}
_VLLM_ONLY |= dict.fromkeys(("enforce_eager", "gpu_memory_utilization", "swap_space", "disable_log_stats"))


@dataclasses.dataclass(slots=True)
class Logprob:
    """Log-probability of one token, its rank (1 is best) and its text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    """One completion. `finish_reason`: None while it runs, then "stop", "length", "abort" or "error".

    `stop_reason`: the stop string or stop token id that ended it; None after end-of-sequence; with "error", what went
    wrong. `logprobs`: for each token, by token id.
    """

    index: int
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclasses.dataclass(slots=True, eq=False)
class RequestOutput:
    """A prompt and its completions so far. The same object is returned, grown, in each step that adds to it. Of a session
    each turn has one: the prompt is its input alone."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics  # of the first completion
    finished: bool = False
    kv_transfer_params: dict[str, Any] | None = None  # what a decode engine needs to fetch the prompt's blocks


@dataclasses.dataclass(slots=True)
class _Running:
    """One completion in the engine: where its tokens go."""

    output: RequestOutput
    completion: CompletionOutput
    detokenizer: Detokenizer


@dataclasses.dataclass(slots=True)
class _Session:
    """A request that stays open (rule S13)."""

    num_turns: int = 0
    num_refused: int = 0  # of these: they are no part of it
    # Those that have not ended, in order, and their numbers: the first runs, or it waits like any request.
    turns: dict[RequestOutput, int] = dataclasses.field(default_factory=dict)
    idle_since: float = dataclasses.field(default_factory=time.monotonic)  # if there are none
    num_tokens: int = 0  # at least: of answers that have ended, and their inputs; the engine core knows better


class EngineInfo(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """What a front end has to know about its engine core."""

    model_path: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    kv_port: int | None  # on which a decode engine asks this one for blocks
    scheduling_policy: str = "fcfs"

    @classmethod
    def of(cls, core: "EngineCore") -> "EngineInfo":
        model, kv_port = core.model.config, getattr(core.connector, "port", None)
        about_model = str(core.model_path), core.max_model_len, model.vocab_size, model.eos_token_ids
        return cls(*about_model, kv_port, core.config.scheduling_policy)


class Frontend:
    """Turns prompts into requests of an engine core, and what the core answers into text.

    Args:
        core: where the requests go.
        info: about that core.
        seed: requests without a seed draw theirs from this one.
    """

    def __init__(self, core: "EngineCore | EngineClient", info: EngineInfo, seed: int) -> None:
        self._core, self._info, self._seed = core, info, seed
        self.tokenizer = load_tokenizer(Path(info.model_path))
        self.eos_token_ids = info.eos_token_ids or self.tokenizer.eos_token_ids
        # By id in the engine core (each of n completions has its own), and turn of a session.
        self._running: dict[tuple[str, int | None], _Running] = {}
        self._live: set[str] = set()  # ids of the outputs that are not finished
        self.sessions: dict[str, _Session] = {}  # those that are open
        self._ids = itertools.count()

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        kv_transfer_params: Transfer = None,
        priority: int = 0,
        session: str | None = None,
    ) -> RequestOutput:
        """Queues one prompt. Returns its output object, still empty. Raises UserError if it can never be served.

        `kv_transfer_params` are about the prompt, which is transferred once: the first of n completions gets them.
        `priority`: lower is more urgent; for an engine with the scheduling policy `priority`.
        `session`: the prompt goes on where the last answer in this session ended. It may come before it has.
        """
        in_range = type(priority) is int and abs(priority) <= 1000
        require(in_range, f"priority is {priority!r}; it must be a whole number from -1000 to 1000.")
        wanted = "A request has a priority, and the engine has none; start it with --scheduling-policy priority."
        require(not priority or self._info.scheduling_policy == "priority", wanted)
        known = None if session is None else self._find_session(session)
        text, token_ids, cache_salt = self._tokenize(prompt, session)
        self._check_token_ids("stop_token_ids", params.stop_token_ids)
        if known:
            alone = params.n == 1 and not params.stop and kv_transfer_params is None and request_id is None
            require(alone, "Input of a session takes no n, stop (stop_token_ids it takes), id or kv_transfer_params.")
            only_first = "A session has the cache_salt of its first input; leave it away afterwards."
            require(not known.num_turns or cache_salt is None, only_first)
        check_length(len(token_ids), known.num_tokens if known else 0, self._info.max_model_len)
        request_id = session or request_id or self._new_id()
        child_ids = [request_id] if params.n == 1 else [f"{request_id}#{i}" for i in range(params.n)]
        in_use = known is None and any(map(self._is_in_use, [request_id, *child_ids]))
        require(not in_use, f"Request id {request_id!r} is already in use.")
        turn, seed = known.num_turns if known else None, params.seed
        if seed is None:  # from the engine's seed and the id, so that a batch that is resumed goes on as it would have
            name = f"{self._seed}/{request_id}" + (f"/{turn}" if known else "")
            seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
        output = RequestOutput(request_id, text, token_ids, [], RequestMetrics())
        for i, child_id in enumerate(child_ids):
            own = dataclasses.replace(params, n=1, seed=(seed + i) % 2**63)
            transfer = kv_transfer_params if i == 0 else None
            request = Request(child_id, token_ids, own, self.eos_token_ids, cache_salt, transfer, priority, turn)
            self._core.add_request(request)
            output.outputs.append(CompletionOutput(i, logprobs=None if params.logprobs is None else []))
            detokenizer = Detokenizer(self.tokenizer, token_ids, own)
            self._running[child_id, turn] = _Running(output, output.outputs[i], detokenizer)
        if known:
            known.turns[output] = known.num_turns
            known.num_turns += 1
        else:
            self._live.add(request_id)
        return output

    def open_session(self, request_id: str | None = None) -> str:
        """A request that gets its input piece by piece, and keeps its KV cache in between (rule S13). Returns its id, for
        `add_request`; `abort_requests` ends it."""
        request_id = self._new_id() if request_id is None else request_id
        good = isinstance(request_id, str) and request_id != "" and not self._is_in_use(request_id)
        require(good, f"Request id {request_id!r} is already in use, or no text.")
        self.sessions[request_id] = _Session()
        return request_id

    def end_idle_sessions(self, timeout: float) -> None:
        """Ends the sessions that have waited longer than that, in seconds, for their next input."""
        before = time.monotonic() - timeout
        idle = [i for i, session in self.sessions.items() if not session.turns and session.idle_since < before]
        self.abort_requests(idle)

    def _find_session(self, session: str) -> _Session:
        known = self.sessions.get(session) if isinstance(session, str) else None
        if known is None:
            raise UserError(f"There is no session {session!r}; it may have ended. Open another one.")
        return known

    def _is_in_use(self, request_id: str) -> bool:
        return request_id in self._live or request_id in self.sessions or (request_id, None) in self._running

    def _new_id(self) -> str:
        return next(i for i in map(str, self._ids) if not self._is_in_use(i))

    def abort_requests(self, request_ids: Iterable[str], reason: str = "abort", why: str | None = None) -> None:
        """Ends requests and sessions. Their outputs keep what they have, with this finish reason and stop reason."""
        wanted = {request_ids} if isinstance(request_ids, str) else set(request_ids)
        sessions = wanted & self.sessions.keys()
        for session in sessions:
            del self.sessions[session]
        ended = {key: running for key, running in self._running.items() if running.output.request_id in wanted}
        self._core.abort_requests(sessions | {request_id for request_id, _ in ended})
        for key, running in ended.items():
            running.completion.finish_reason, running.completion.stop_reason = reason, why
            self._finish(*key)

    def abort_outputs(self, outputs: Iterable[RequestOutput]) -> None:
        """Ends what nobody waits for any more. Of a session only these turns: it stays, with what was said so far."""
        for output in (output for output in outputs if not output.finished):
            session = self.sessions.get(output.request_id)
            if session is None:
                self.abort_requests([output.request_id])
                continue
            turn = session.turns[output]
            self._core.abort_turn(output.request_id, turn)
            output.outputs[0].finish_reason = "abort"
            self._finish(output.request_id, turn)

    def has_unfinished_requests(self) -> bool:
        return bool(self._running)

    def process_outputs(self, news: Iterable[EngineCoreOutput]) -> list[RequestOutput]:
        """Takes in what a step of the engine core returned. Returns the outputs it added to.

        News of a request that has ended here are ignored: they were under way when it did.
        """
        changed: dict[RequestOutput, None] = {}
        stopped: list[str] = []  # by their text: the engine core cannot know
        for item in news:
            running = self._running.get((item.request_id, item.turn))
            if running is None:
                continue
            self._take_in(running, item)
            changed[running.output] = None
            if running.completion.finish_reason is not None:
                self._finish(item.request_id, item.turn)
                if item.finish_reason is None:
                    stopped.append(item.request_id)
        self._core.abort_requests(stopped)
        return list(changed)

    def _take_in(self, running: _Running, news: EngineCoreOutput) -> None:
        """Adds what is new to a completion; a stop string in its text ends it."""
        completion, token_ids = running.completion, news.new_token_ids
        completion.finish_reason, completion.stop_reason = news.finish_reason, news.stop_reason
        if completion.index == 0:
            running.output.metrics, running.output.kv_transfer_params = news.metrics, news.kv_transfer_params
        pieces = [[token_id] for token_id in token_ids] or [[]]
        if news.finish_reason == "stop":
            pieces[-1] = []  # a stop token is not part of the text
        for count, piece in enumerate(pieces, 1):  # one by one: nothing comes after a stop string
            finished = news.finish_reason is not None and count == len(pieces)
            if (stop := running.detokenizer.append(piece, finished)) is not None:
                break
        completion.text = running.detokenizer.text
        completion.token_ids += token_ids[:count]
        if news.logprobs is not None and completion.logprobs is not None:
            for token_id, logprobs in zip(token_ids[:count], news.logprobs):
                completion.logprobs.append(self._describe(token_id, logprobs))
                completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + logprobs.logprob
        if stop is not None:
            completion.finish_reason, completion.stop_reason = "stop", stop

    def _finish(self, request_id: str, turn: int | None) -> None:
        """A completion has ended."""
        running = self._running.pop((request_id, turn))
        running.output.finished = all(completion.finish_reason is not None for completion in running.output.outputs)
        if session := self.sessions.get(request_id):
            prompt, answer = running.output.prompt_token_ids, running.completion.token_ids
            session.num_tokens += len(prompt) + len(answer) if answer else 0  # else it may never have been taken up
            session.num_refused += not answer and running.completion.finish_reason == "error"
            session.idle_since = time.monotonic()
            del session.turns[running.output]
        elif running.output.finished:
            self._live.discard(running.output.request_id)

    def _describe(self, token_id: int, logprobs: TokenLogprobs) -> dict[int, Logprob]:
        ranked = {t: Logprob(p, rank, self.tokenizer.decode([t], False)) for rank, (t, p) in enumerate(logprobs.top, 1)}
        sampled = Logprob(logprobs.logprob, logprobs.rank, self.tokenizer.decode([token_id], False))
        return {token_id: sampled} | ranked

    def _tokenize(self, prompt: Prompt, session: str | None) -> tuple[str | None, list[int], str | None]:
        """(text if given, token ids, cache salt if given)."""
        if not isinstance(prompt, dict):
            prompt = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
        text, token_ids, salt = (prompt.get(key) for key in ("prompt", "prompt_token_ids", "cache_salt"))
        require(salt is None or isinstance(salt, str), f"cache_salt is {salt!r}; it must be a text.")
        if token_ids is None:
            if not isinstance(text, str):
                raise UserError('A prompt is a text, token ids, {"prompt": text} or {"prompt_token_ids": ids}.')
            token_ids = self.encode(text, session)
        self._check_token_ids("prompt_token_ids", token_ids)
        return text, list(token_ids), salt

    def encode(self, text: str, session: str | None = None) -> list[int]:
        """Token ids. What a model wants at the beginning of a text stands only there, not in later input of a session."""
        known = None if session is None else self._find_session(session)
        return self.tokenizer.encode(text, add_special_tokens=not (known and known.num_turns > known.num_refused))

    def _check_token_ids(self, name: str, ids: Any) -> None:
        size = self._info.vocab_size
        good = isinstance(ids, (list, tuple)) and all(type(t) is int and 0 <= t < size for t in ids)
        require(good, f"{name} must be a list of token ids of this model's vocabulary, 0 to {size - 1}.")


class LLM(Frontend):
    """A front end with its engine core in the same process.

    Args:
        model: see `EngineConfig.model`.
        options: fields of EngineConfig.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        from nanopd.engine.core import EngineCore  # with torch; a front end alone does without

        for name in _VLLM_ONLY.keys() & options.keys():
            value, only = options.pop(name), _VLLM_ONLY[name]
            if only is None:
                logger.warning(f"{name} is ignored: nanopd has no such option")
            elif value not in (only, None):
                raise UserError(f"{name} can only be {only!r}: nanopd has nothing else.")
        known = {f.name for f in dataclasses.fields(EngineConfig)}
        if unknown := sorted(options.keys() - known):
            raise UserError(f"Unknown engine option {', '.join(unknown)}; known are {', '.join(sorted(known))}.")
        self.config = EngineConfig(model=model, **options)
        self.core = EngineCore(self.config)
        super().__init__(self.core, EngineInfo.of(self.core), self.config.seed)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: bool = False,
        priority: int | Sequence[int] | None = None,
        session: str | None = None,
    ) -> list[RequestOutput]:
        """Completes all prompts and returns the outputs in their order. (`use_tqdm`: as in vLLM, but there is no bar.)

        `priority`: one for each prompt, or one for all; lower is more urgent. `session`: from `open_session`; one prompt is
        its input.
        Raises UserError before anything runs if one of the prompts cannot be served.
        """
        single = isinstance(prompts, (str, dict)) or (prompts and isinstance(prompts[0], int))
        todo: Any = [prompts] if single else prompts
        params = sampling_params if isinstance(sampling_params, Sequence) else [sampling_params] * len(todo)
        priorities = priority if isinstance(priority, Sequence) else [priority or 0] * len(todo)
        if not len(params) == len(priorities) == len(todo):
            counts = f"{len(todo)} prompts, {len(params)} sampling params and {len(priorities)} priorities"
            raise UserError(f"There are {counts}; give one each, or one for all.")
        require(session is None or len(todo) == 1, "Input of a session is one prompt; call again for the next.")
        outputs: list[RequestOutput] = []
        try:
            for prompt, wish, urgency in zip(todo, params, priorities):
                outputs.append(self.add_request(prompt, wish or SamplingParams(), priority=urgency, session=session))
            while not all(output.finished for output in outputs):
                self.step()
        except BaseException:
            self.abort_outputs(outputs)
            raise
        return outputs

    def chat(
        self, messages: Chat | Sequence[Chat], sampling_params: Params = None, use_tqdm: bool = False
    ) -> list[RequestOutput]:
        """The same for one conversation or a list of them: [{"role": "user", "content": …}, …]."""
        conversations: Any = [messages] if messages and isinstance(messages[0], dict) else messages
        prompts = [{"prompt_token_ids": self.tokenizer.apply_chat_template(c)} for c in conversations]
        return self.generate(prompts, sampling_params)

    def step(self) -> list[RequestOutput]:
        """One step of the engine. Returns the outputs it added to."""
        return self.process_outputs(self.core.step())

    def stats(self) -> SchedulerStats:
        return self.core.scheduler.stats()
