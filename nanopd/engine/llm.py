"""LLM: the offline interface. Prompts in, text out; around an EngineCore it does what needs a tokenizer.

A program written for vLLM's `LLM` and `SamplingParams` changes an import. Underneath, `add_request`, `step` and
`abort_requests` are there for whoever wants to see tokens as they come.
"""

import dataclasses
import hashlib
import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from nanopd.config import EngineConfig, SamplingParams, UserError
from nanopd.core.output import EngineCoreOutput, SchedulerStats, TokenLogprobs
from nanopd.engine.core import EngineCore
from nanopd.engine.detokenizer import Detokenizer
from nanopd.models.tokenizer import load_tokenizer
from nanopd.request import Request, RequestMetrics

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | dict[str, Any]
"""Text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}, with {"cache_salt": text} if wanted."""

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


@dataclasses.dataclass(slots=True)
class RequestOutput:
    """A prompt and its completions so far. The same object is returned, grown, in each step that adds to it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    finished: bool = False


@dataclasses.dataclass(slots=True)
class _Running:
    """One completion in the engine: where its tokens go."""

    output: RequestOutput
    completion: CompletionOutput
    detokenizer: Detokenizer
    stop_token_ids: frozenset[int]


class LLM:
    """An engine with its tokenizer.

    Args:
        model: see `EngineConfig.model`.
        options: fields of EngineConfig.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        for name in _VLLM_ONLY.keys() & options.keys():
            if options.pop(name) not in (_VLLM_ONLY[name], None) and _VLLM_ONLY[name] is not None:
                raise UserError(f"{name} can only be {_VLLM_ONLY[name]!r}: nanopd has nothing else.")
            if _VLLM_ONLY[name] is None:
                logger.warning(f"{name} is ignored: nanopd has no such option")
        known = {f.name for f in dataclasses.fields(EngineConfig)}
        if unknown := sorted(options.keys() - known):
            raise UserError(f"Unknown engine option {', '.join(unknown)}; known are {', '.join(sorted(known))}.")
        self.config = EngineConfig(model=model, **options)
        self.core = EngineCore(self.config)
        self.tokenizer = load_tokenizer(self.core.model_path)
        self.eos_token_ids = self.core.model.config.eos_token_ids or self.tokenizer.eos_token_ids
        self._running: dict[str, _Running] = {}  # by id in the engine core: each of n completions has its own
        self._live: set[str] = set()  # ids of the outputs that are not finished
        self._ids = itertools.count()

    # ---------------------------------------------------------------- all at once

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Completes all prompts and returns the outputs in their order. (`use_tqdm`: as in vLLM, but there is no bar.)

        Raises UserError before anything runs if one of the prompts cannot be served.
        """
        single = isinstance(prompts, (str, dict)) or (prompts and isinstance(prompts[0], int))
        todo: Any = [prompts] if single else prompts
        params = sampling_params if isinstance(sampling_params, Sequence) else [sampling_params] * len(todo)
        if len(params) != len(todo):
            raise UserError(f"There are {len(todo)} prompts and {len(params)} sampling params; give one each, or one.")
        outputs: list[RequestOutput] = []
        try:
            for prompt, wish in zip(todo, params):
                outputs.append(self.add_request(prompt, wish or SamplingParams()))
            while not all(output.finished for output in outputs):
                self.step()
        except BaseException:
            self.abort_requests(output.request_id for output in outputs)
            raise
        return outputs

    def chat(
        self,
        messages: Sequence[dict[str, str]] | Sequence[Sequence[dict[str, str]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """The same for one conversation or a list of them: [{"role": "user", "content": …}, …]."""
        conversations: Any = [messages] if messages and isinstance(messages[0], dict) else messages
        prompts = [{"prompt_token_ids": self.tokenizer.apply_chat_template(c)} for c in conversations]
        return self.generate(prompts, sampling_params)

    # ---------------------------------------------------------------- step by step

    def add_request(self, prompt: Prompt, params: SamplingParams, request_id: str | None = None) -> RequestOutput:
        """Queues one prompt. Returns its output object, still empty. Raises UserError if it can never be served."""
        if request_id is None:
            request_id = next(i for i in map(str, self._ids) if i not in self._live)
        if request_id in self._live:
            raise UserError(f"Request id {request_id!r} is already in use.")
        text, token_ids, cache_salt = self._tokenize(prompt)
        self._check_token_ids("stop_token_ids", params.stop_token_ids)
        seed = params.seed
        if seed is None:  # from the engine's seed and the id, so that a batch that is resumed goes on as it would have
            digest = hashlib.blake2b(f"{self.config.seed}/{request_id}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "little") >> 1
        requests = []
        for i in range(params.n):
            own = dataclasses.replace(params, n=1, seed=(seed + i) % 2**63)
            child_id = request_id if params.n == 1 else f"{request_id}#{i}"
            if child_id in self._running:
                raise UserError(f"Request id {request_id!r} is already in use.")
            requests.append(Request(child_id, token_ids, own, self.eos_token_ids, cache_salt))
        completions = [CompletionOutput(i, logprobs=None if params.logprobs is None else []) for i in range(params.n)]
        output = RequestOutput(request_id, text, token_ids, completions, requests[0].metrics)
        for request, completion in zip(requests, completions):
            detokenizer = Detokenizer(self.tokenizer, token_ids, request.sampling_params)
            self.core.add_request(request)
            self._running[request.request_id] = _Running(output, completion, detokenizer, request.stop_token_ids)
        self._live.add(request_id)
        return output

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Ends requests; their outputs keep what they have, with finish reason "abort"."""
        wanted = set(request_ids)
        ended = [i for i, running in self._running.items() if running.output.request_id in wanted]
        self.core.abort_requests(ended)
        for request_id in ended:
            running = self._running.pop(request_id)
            running.completion.finish_reason = "abort"
            running.output.finished = True
            self._live.discard(running.output.request_id)

    def has_unfinished_requests(self) -> bool:
        return bool(self._running)

    def stats(self) -> SchedulerStats:
        return self.core.scheduler.stats()

    def step(self) -> list[RequestOutput]:
        """One step of the engine. Returns the outputs it added to."""
        changed: dict[str, RequestOutput] = {}
        stopped: list[str] = []
        for news in self.core.step():
            running = self._running[news.request_id]
            if self._take_in(running, news):
                stopped.append(news.request_id)
            if running.completion.finish_reason is not None:
                del self._running[news.request_id]
                running.output.finished = all(c.finish_reason is not None for c in running.output.outputs)
                if running.output.finished:
                    self._live.remove(running.output.request_id)
            changed[running.output.request_id] = running.output
        self.core.abort_requests(stopped)  # text ended them: the engine core cannot know
        return list(changed.values())

    def _take_in(self, running: _Running, news: EngineCoreOutput) -> bool:
        """Adds what is new to a completion. Returns whether a stop string ended it."""
        completion = running.completion
        completion.token_ids += news.new_token_ids
        completion.finish_reason, completion.stop_reason = news.finish_reason, news.stop_reason
        visible = news.new_token_ids
        if news.finish_reason == "stop" and visible[-1] in running.stop_token_ids:
            visible = visible[:-1]  # a stop token ends the text; it is not part of it
        stop = running.detokenizer.append(visible, finished=news.finish_reason is not None)
        completion.text = running.detokenizer.text
        if news.logprobs is not None and completion.logprobs is not None:
            completion.logprobs.append(self._describe(news.new_token_ids[-1], news.logprobs))
            completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + news.logprobs.logprob
        if stop is None:
            return False
        completion.finish_reason, completion.stop_reason = "stop", stop
        return news.finish_reason is None

    def _describe(self, token_id: int, logprobs: TokenLogprobs) -> dict[int, Logprob]:
        ranked = {t: Logprob(p, rank, self.tokenizer.decode([t], False)) for rank, (t, p) in enumerate(logprobs.top, 1)}
        sampled = Logprob(logprobs.logprob, logprobs.rank, self.tokenizer.decode([token_id], False))
        return {token_id: sampled} | ranked

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int], str | None]:
        """(text if given, token ids, cache salt if given)."""
        if not isinstance(prompt, dict):
            prompt = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
        text, token_ids, salt = (prompt.get(key) for key in ("prompt", "prompt_token_ids", "cache_salt"))
        if salt is not None and not isinstance(salt, str):
            raise UserError(f"cache_salt is {salt!r}; it must be a text.")
        if token_ids is not None:
            self._check_token_ids("prompt_token_ids", token_ids)
            return text, list(token_ids), salt
        if not isinstance(text, str):
            raise UserError('A prompt is a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}.')
        return text, self.tokenizer.encode(text), salt

    def _check_token_ids(self, name: str, ids: Any) -> None:
        size = self.core.model.config.vocab_size
        if not isinstance(ids, (list, tuple)) or not all(type(t) is int and 0 <= t < size for t in ids):
            raise UserError(f"{name} must be a list of token ids of this model's vocabulary, 0 to {size - 1}.")
