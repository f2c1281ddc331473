"""One request from arrival to end: its tokens, how far they are computed, and which state it is in.

There is no "prefill" or "decode" state (rule S1): a request has `num_computed_tokens`, and wants to catch up with
`num_tokens_with_spec`. The states only say which queue it is in and why. TRANSITIONS below is the whole truth about
them; changing `status` against it raises.

A request knows nothing about tensors or about text. Lesson 00 follows one from end to end.
"""

import enum
import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nanopd.config import SamplingParams, require


class RequestStatus(enum.Enum):
    """Where a request stands. Those from FINISHED_STOPPED on are final."""

    WAITING = "waiting"
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = "waiting for grammar"
    WAITING_FOR_REMOTE_KVS = "waiting for remote KVs"
    WAITING_FOR_STREAMING_REQ = "waiting for input"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"

    @property
    def is_finished(self) -> bool:
        return self in FINISHED


_S = RequestStatus
FINISHED = frozenset({_S.FINISHED_STOPPED, _S.FINISHED_LENGTH, _S.FINISHED_ABORTED, _S.FINISHED_ERROR})
_CUT_SHORT = frozenset({_S.FINISHED_ABORTED, _S.FINISHED_ERROR})
BLOCKED = frozenset({_S.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR, _S.WAITING_FOR_REMOTE_KVS})  # until promoted

TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    _S.WAITING: frozenset({_S.RUNNING}) | BLOCKED | _CUT_SHORT,
    # Promoted, since it is compiled; or it can't be used, and a session waits for other input.
    _S.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR: frozenset({_S.WAITING, _S.WAITING_FOR_STREAMING_REQ}) | _CUT_SHORT,
    _S.WAITING_FOR_REMOTE_KVS: frozenset({_S.WAITING}) | _CUT_SHORT,  # promoted, or given up: compute it here
    _S.WAITING_FOR_STREAMING_REQ: frozenset({_S.WAITING}) | _CUT_SHORT,  # a session: further input has come
    _S.RUNNING: frozenset({_S.PREEMPTED, _S.WAITING_FOR_STREAMING_REQ}) | FINISHED,
    _S.PREEMPTED: frozenset({_S.RUNNING, _S.WAITING_FOR_REMOTE_KVS}) | _CUT_SHORT,
    **{status: frozenset() for status in FINISHED},
}


def check_length(num_tokens: int, before: int, max_model_len: int) -> None:
    """S9: may a prompt, or the input of a session with `before` tokens, have so many? Raises UserError."""
    room = max_model_len - 1 - before
    what, after = f"The prompt has {num_tokens} tokens", f", after {before} tokens in this session" if before else ""
    require(room > 0, f"{what}, and the session is full, with {before} of {max_model_len}. Open another one.")
    limit = f"at most {room} tokens: max_model_len is {max_model_len}, with the output{after}"
    require(0 < num_tokens <= room, f"{what}; it can't be empty, and have {limit}.")


@dataclass(slots=True)
class RequestMetrics:
    """Times are seconds of `time.monotonic()`; None as long as the thing has not happened."""

    arrival_time: float = field(default_factory=time.monotonic)
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache or a connector saved, at the first scheduling
    num_preemptions: int = 0
    num_prompt_tokens: int = 0  # of a session: all before this answer
    num_draft_tokens: int = 0  # that were verified; `num_accepted_tokens` of them were right
    num_accepted_tokens: int = 0
    history: list[tuple[float, str]] = field(default_factory=list)  # when it came into which status
    transfer: dict[str, int | float] | None = None  # what it took to bring its KV blocks here: see protocol.Done

    def as_dict(self, num_output_tokens: int) -> dict[str, Any]:
        """What users read: seconds of queueing, to the first token, between tokens; the counts; when it came
        into which status, in seconds since its arrival."""

        def since(start: float | None, end: float | None) -> float | None:
            return None if start is None or end is None else round(end - start, 6)

        decoding = since(self.first_token_time, self.last_token_time)
        return {
            "queue_time": since(self.arrival_time, self.first_scheduled_time),
            "time_to_first_token": since(self.arrival_time, self.first_token_time),
            "inter_token_latency": decoding / (num_output_tokens - 1) if decoding and num_output_tokens > 1 else None,
            "e2e_latency": since(self.arrival_time, self.last_token_time),
            "num_cached_tokens": self.num_cached_tokens,
            "num_preemptions": self.num_preemptions,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "history": [(round(at - self.arrival_time, 6), status) for at, status in self.history],
            "transfer": self.transfer,
        }


class Request:
    """What the scheduler keeps about one request.

    Args:
        request_id: unique among the unfinished requests of an engine.
        prompt_token_ids: at least one token.
        sampling_params: `seed` is set by whoever makes the request, so that a preemption changes no token.
        eos_token_ids: tokens that end the output unless `ignore_eos`. The end of a grammar is one in any case (S12).
        cache_salt: only requests with the same salt share cached blocks (rule K2).
        kv_transfer_params: for the connector; the scheduler does not look inside.
        priority: lower is more urgent; counts with the scheduling policy `priority`.
        turn: of a session, a request that gets further input (rule S13): which input this is, from 0. None: no session.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling_params: SamplingParams,
        eos_token_ids: Sequence[int] = (),
        cache_salt: str | None = None,
        kv_transfer_params: Any = None,
        priority: int = 0,
        turn: int | None = None,
    ) -> None:
        self.request_id = request_id
        self.sampling_params = sampling_params
        goes_on = sampling_params.ignore_eos and sampling_params.structured_outputs is None
        self.eos_token_ids = frozenset(() if goes_on else eos_token_ids)
        self.stop_token_ids = self.eos_token_ids | frozenset(sampling_params.stop_token_ids)
        self.cache_salt = cache_salt
        self.kv_transfer_params = kv_transfer_params
        self.priority = priority
        self.turn = turn
        self.streaming_queue: deque[Request] = deque()  # a session's further input, as requests with its id
        self.token_ids = array("q", prompt_token_ids)  # prompt + output, 8 bytes a token: hashing reads it in place
        self.num_prompt_tokens = self.num_input_tokens = len(self.token_ids)  # of a session, input: what came last
        self.block_hashes: list[bytes] = []  # one for each full block, filled in as tokens arrive (rule K3)
        self.spec_token_ids: list[int] = []  # a draft: tokens that may come next, for the next step to verify
        self.num_computed_tokens = 0
        self.num_external_tokens = 0  # of those, how many a connector brings or brought
        self.ask_connector = True  # False after a load failed or was given up: then computed here (rule S10)
        self.metrics = RequestMetrics(num_prompt_tokens=self.num_prompt_tokens)
        self.stop_reason: int | str | None = None  # the token or the text that stopped it, or what went wrong
        self._status = RequestStatus.WAITING
        self.metrics.history.append((self.metrics.arrival_time, self._status.value))

    @property
    def status(self) -> RequestStatus:
        return self._status

    @status.setter
    def status(self, new: RequestStatus) -> None:
        if new not in TRANSITIONS[self._status]:
            change = f"{self._status.name} -> {new.name}"
            raise RuntimeError(f"request {self.request_id}: {change} is not a legal transition")
        self._status = new
        self.metrics.history.append((time.monotonic(), new.value))

    def resume(self) -> None:
        """Takes up the next input of a session: all that was said so far becomes the prompt of another answer (S13)."""
        turn = self.streaming_queue.popleft()
        self.token_ids.extend(turn.token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        taken_over = "turn", "sampling_params", "eos_token_ids", "stop_token_ids", "priority", "metrics", "stop_reason"
        for name in (*taken_over, "num_input_tokens"):
            setattr(self, name, getattr(turn, name))
        self.metrics.num_prompt_tokens = self.num_prompt_tokens
        self.status = RequestStatus.WAITING

    def give_back(self) -> None:
        """The last input of a session leaves it again: it was refused before there was a token of an answer (S13)."""
        del self.token_ids[self.num_tokens - self.num_input_tokens :]
        self.num_prompt_tokens, self.num_input_tokens = self.num_tokens, 0

    @property
    def num_tokens(self) -> int:
        """Prompt + output."""
        return len(self.token_ids)

    @property
    def num_tokens_with_spec(self) -> int:
        """Prompt + output + draft tokens: what `num_computed_tokens` has to catch up with (rule S1)."""
        return len(self.token_ids) + len(self.spec_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def check_stop(self, max_model_len: int) -> RequestStatus | None:
        """Does the last token end the request? Stop strings are not known here: text is somebody else's business."""
        params, token_id = self.sampling_params, self.token_ids[-1]
        # With a grammar, an EOS so early has passed the sampler because nothing else was allowed (S12).
        ended = params.structured_outputs and token_id in self.eos_token_ids
        if ended or (token_id in self.stop_token_ids and self.num_output_tokens >= params.min_tokens):
            self.stop_reason = None if token_id in self.eos_token_ids else token_id
            return RequestStatus.FINISHED_STOPPED
        if self.num_output_tokens >= params.max_tokens or self.num_tokens >= max_model_len:
            return RequestStatus.FINISHED_LENGTH
        return None

    def __repr__(self) -> str:
        return f"Request({self.request_id}, {self._status.name}, {self.num_computed_tokens}/{self.num_tokens} tokens)"
