"""What the scheduler tells the worker, what the worker answers, and what the engine tells its caller.

Everything here is plain data: lists, dicts and numbers, no tensors. In vLLM these cross process borders.
"""

from dataclasses import dataclass, field, fields
from typing import Any

from nanopd.config import SamplingParams
from nanopd.request import Request, RequestMetrics


@dataclass(slots=True)
class NewRequestData:
    """All the worker needs to know of a request it has not seen, or has seen and dropped at a preemption."""

    request_id: str
    token_ids: list[int]  # prompt and, after a preemption, the output so far
    num_prompt_tokens: int
    sampling_params: SamplingParams
    stop_token_ids: frozenset[int]  # what `min_tokens` forbids until there are enough
    block_ids: list[int]
    num_computed_tokens: int

    @classmethod
    def of(cls, r: Request, block_ids: list[int]) -> "NewRequestData":
        tokens, about = r.token_ids.tolist(), (r.num_prompt_tokens, r.sampling_params, r.stop_token_ids)
        return cls(r.request_id, tokens, *about, block_ids, r.num_computed_tokens)


@dataclass(slots=True)
class CachedRequestData:
    """The delta for a request the worker knows (rule S7). It has the tokens: it sampled them itself."""

    request_id: str
    new_block_ids: list[int]
    num_computed_tokens: int


@dataclass(slots=True)
class SchedulerOutput:
    """One step: what to compute, and what to forget. The order of `num_scheduled_tokens` is the order of the batch."""

    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    scheduled_cached_reqs: list[CachedRequestData] = field(default_factory=list)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    total_num_scheduled_tokens: int = 0
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)  # drafts, among those scheduled
    num_common_prefix_blocks: int = 0  # at the start of all tables, whether attention makes use of it or not
    grammar_bitmask: dict[str, list[bytes]] = field(default_factory=dict)  # allowed next, and after each draft (S12)
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] = field(default_factory=set)
    lost_req_ids: set[str] = field(default_factory=set)  # alive, but the worker must forget them: see `take_back`
    kv_connector_metadata: Any = None  # from the connector's scheduler half to its worker half


@dataclass(slots=True)
class KVConnectorOutput:
    """What the connector's worker half has seen happen since the last step: ids of requests.

    `given_up`: nobody waits for these loads any more, but a peer may still write into their blocks. Each of them is
    reported again, in one of the other sets, when it can't (rule P4).
    """

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)
    given_up: set[str] = field(default_factory=set)
    transfers: dict[str, dict[str, int | float]] = field(default_factory=dict)  # of those that came: bytes, seconds, …

    def add(self, other: "KVConnectorOutput") -> None:
        for f in fields(self):
            getattr(self, f.name).update(getattr(other, f.name))


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the sampled token's, its rank (1 is best), and the best ones', best first."""

    logprob: float
    rank: int
    top: list[tuple[int, float]]


@dataclass(slots=True)
class ModelRunnerOutput:
    """What the worker answers. A request whose tokens have not all caught up has no sampled token; others have one, and
    one more for each draft token that was right."""

    sampled_token_ids: dict[str, list[int]]
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    kv_connector_output: KVConnectorOutput | None = None
    num_common_prefix_blocks: int = 0  # read once for all (cascade): as many as in the plan, fewer, or none


@dataclass(slots=True)
class EngineCoreOutput:
    """News of one request: tokens since the last step, and how it ended if it did (see RequestStatus)."""

    request_id: str
    new_token_ids: list[int]
    metrics: RequestMetrics
    logprobs: list[TokenLogprobs] | None = None  # of each new token
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    turn: int | None = None  # of a session: to which of its inputs this is the answer


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """One look at the scheduler, for progress bars and metrics. Those from `num_preemptions` on only grow."""

    num_running: int = 0
    num_waiting: int = 0  # among them those that load
    num_loading: int = 0  # WAITING_FOR_REMOTE_KVS
    num_compiling: int = 0  # WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR, and their grammar is not ready
    num_reclaiming: int = 0  # ended or given up, with blocks that a peer may still touch
    num_idle: int = 0  # sessions: WAITING_FOR_STREAMING_REQ
    kv_cache_usage: float = 0.0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0  # tokens looked up in the prefix cache
    prefix_cache_hits: int = 0  # tokens found there
    num_scheduled_tokens: int = 0
    spec_decode_num_draft_tokens: int = 0
    spec_decode_num_accepted_tokens: int = 0
    cascade_saved_tokens: int = 0  # K and V that each layer did not read again, since it read a prefix once for all
    num_early: int = 0  # inputs in streaming_queues: they wait for an answer to end


@dataclass(slots=True)
class TransferStats:
    """What a connector has moved since it started. All of it only grows."""

    sent: int = 0  # requests
    sent_bytes: int = 0
    sent_pieces: int = 0
    sent_seconds: float = 0.0  # of writing, added up over the sender threads
    send_failures: int = 0  # cancelled ones among them
    received: int = 0
    received_bytes: int = 0
    receive_failures: int = 0
