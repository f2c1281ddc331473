"""Drives the scheduler without a model: the tokens are made up, the transfers happen when the test says so."""

import dataclasses
from typing import Any

from nanopd.config import EngineConfig, SamplingParams
from nanopd.connector.base import KVConnectorScheduler
from nanopd.core.kv_cache import KVCacheManager
from nanopd.core.output import EngineCoreOutput, KVConnectorOutput, ModelRunnerOutput, SchedulerOutput
from nanopd.core.scheduler import Scheduler
from nanopd.request import Request


class FakeConnector(KVConnectorScheduler):
    """Has, elsewhere, `remote[request id]` tokens of a request; None: it does not know yet."""

    def __init__(self, block_size: int = 4) -> None:
        self.block_size = block_size
        self.remote: dict[str, int | None] = {}
        self.load_async = True
        self.delay_free: set[str] = set()
        self.allocated: list[tuple[str, list[int], int]] = []
        self.failed_plans: list[Any] = []
        self.raises: type[BaseException] | None = None
        self.writable: dict[str, list[int]] = {}  # blocks that a peer may write to, until the load is reported as over
        self.readable: dict[str, list[int]] = {}  # blocks that a peer may read, until the send is reported as over
        self.room_wanted = 0  # how often `make_room` was called

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self.raises:
            raise self.raises("the connector failed")
        known = self.remote.get(request.request_id, 0)
        return (None, False) if known is None else (max(0, known - num_computed_tokens), self.load_async)

    def update_state_after_alloc(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        self.allocated.append((request.request_id, block_ids, num_external_tokens))
        if num_external_tokens:
            self.remote.pop(request.request_id, None)  # as in P/D: a remote prefill is loaded once
            first = (request.num_computed_tokens - num_external_tokens) // self.block_size
            if self.load_async:
                self.writable[request.request_id] = block_ids[first:]

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        return dict(scheduler_output.num_scheduled_tokens)

    def step_failed(self, metadata: Any) -> None:
        self.failed_plans.append(metadata)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        delay_free = request.request_id in self.delay_free
        if delay_free and block_ids:
            self.readable[request.request_id] = block_ids
        return delay_free, None

    def make_room(self) -> None:
        self.room_wanted += 1


class FakeGrammars:
    """Compiles when the test says so. Allows every token, until the test says that a matcher has failed."""

    def __init__(self) -> None:
        self.alive: set[str] = set()
        self.news: dict[str, str | None] = {}  # reported with the next step: None is ready, a text is why not
        self.asked: list[str] = []

    def start(self, request: Request) -> None:
        self.alive.add(request.request_id)

    def get_finished(self) -> dict[str, str | None]:
        news, self.news = self.news, {}
        return news

    def bitmask(self, request: Request) -> dict[str, list[bytes]]:
        if request.request_id not in self.alive:
            return {}
        self.asked.append(request.request_id)
        return {request.request_id: [b"\xff"]}

    def forget(self, request_id: str) -> None:
        self.alive.discard(request_id)
        self.news.pop(request_id, None)


def make_scheduler(
    num_blocks: int = 64,
    block_size: int = 4,
    prefix_caching: bool = True,
    max_model_len: int = 1000,
    connector: KVConnectorScheduler | None = None,
    grammars: Any = None,
    **options: Any,
) -> Scheduler:
    kv = KVCacheManager(num_blocks, block_size, prefix_caching)
    return Scheduler(EngineConfig(**options), kv, max_model_len, connector, grammars)


def make_request(
    request_id: str, prompt: int | list[int] = 8, max_tokens: int = 4, cache_salt: str | None = None, **params: Any
) -> Request:
    """`prompt`: token ids, or how many; then they are the request's own and shared with nobody."""
    if isinstance(prompt, int):
        start = 1000 * (1 + sum(request_id.encode()))
        prompt = list(range(start, start + prompt))
    return Request(request_id, prompt, SamplingParams(max_tokens=max_tokens, seed=0, **params), [2], cache_salt)


@dataclasses.dataclass
class Driver:
    """Runs steps and keeps what the worker would keep, to hold it against what the scheduler believes."""

    scheduler: Scheduler
    tables: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    computed: dict[str, int] = dataclasses.field(default_factory=dict)
    outputs: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    reasons: dict[str, str] = dataclasses.field(default_factory=dict)
    ends: list[tuple[str, int | None, str]] = dataclasses.field(
        default_factory=list
    )  # id, turn, reason: in their order
    transfers: KVConnectorOutput | None = None  # reported with the next step
    next_token: int = 10
    right: int = 0  # how many tokens of each draft the model agrees with
    # What was written where: (block, offset) -> the whole sequence up to that token. A read must find its own.
    content: dict[tuple[int, int], object] = dataclasses.field(default_factory=dict)
    found: dict[str, list[object]] = dataclasses.field(default_factory=dict)  # by peers that read an ended request

    def schedule(self) -> SchedulerOutput:
        """One plan, checked against the rules that hold for every plan."""
        scheduler = self.scheduler
        output = scheduler.schedule()
        total = sum(output.num_scheduled_tokens.values())
        assert total == output.total_num_scheduled_tokens <= scheduler.config.max_num_batched_tokens
        assert all(n > 0 for n in output.num_scheduled_tokens.values())
        assert len(output.num_scheduled_tokens) <= scheduler.config.max_num_seqs
        if threshold := scheduler.config.long_prefill_token_threshold:
            assert max(output.num_scheduled_tokens.values(), default=0) <= threshold
        assert not output.preempted_req_ids & output.num_scheduled_tokens.keys()
        for gone in output.finished_req_ids | output.preempted_req_ids | output.lost_req_ids:
            self.tables.pop(gone, None)
            self.computed.pop(gone, None)
        for new in output.scheduled_new_reqs:
            assert new.request_id not in self.tables, "whole data for a request the worker knows"
            self.tables[new.request_id] = list(new.block_ids)
            self.computed[new.request_id] = new.num_computed_tokens
        for known in output.scheduled_cached_reqs:
            self.tables[known.request_id] += known.new_block_ids
            assert self.computed[known.request_id] == known.num_computed_tokens
        writers: dict[int, str] = {}
        for request_id, num_new in output.num_scheduled_tokens.items():
            request = scheduler.requests[request_id]
            table = self.tables[request_id]
            assert table == scheduler.kv.get_block_ids(request_id), "the worker's table differs from the scheduler's"
            start, end = self.computed[request_id], self.computed[request_id] + num_new
            drafts = output.scheduled_spec_decode_tokens.get(request_id, [])
            assert request.num_computed_tokens == end <= request.num_tokens + len(drafts)
            assert not drafts or end == request.num_tokens + len(drafts) < scheduler.max_model_len, "S2"
            block_size = scheduler.kv.block_size
            assert end <= len(table) * block_size, "a token without a slot"
            for index in range(start // block_size, -(-end // block_size)):
                # Two requests may write the same block only if it is the same full block, recomputed at its end.
                other = writers.setdefault(table[index], request_id)
                assert other == request_id or request.block_hashes[index : index + 1], "two requests write one block"
            self.computed[request_id] = end
        return output

    def _write(self, request: Request, start: int, end: int, drafts: list[int] = []) -> None:  # noqa: B006
        tokens = [*request.token_ids, *drafts]
        table, size = self.scheduler.kv.get_block_ids(request.request_id), self.scheduler.kv.block_size
        for position in range(start, end):
            key = (request.cache_salt, tuple(tokens[: position + 1]))
            self.content[table[position // size], position % size] = key

    def execute(self, output: SchedulerOutput) -> None:
        """What the model would do: everyone writes, then everyone reads all that comes before its last token."""
        requests = [(self.scheduler.requests[i], n) for i, n in output.num_scheduled_tokens.items()]
        for request, num_new in requests:
            start = request.num_computed_tokens - num_new
            if request.num_external_tokens and request.num_external_tokens <= start:  # brought with the step, if at all
                connector = self.scheduler.connector
                if isinstance(connector, FakeConnector) and not connector.load_async:
                    self._write(request, start - request.num_external_tokens, start)
                    request.num_external_tokens = 0
            drafts = output.scheduled_spec_decode_tokens.get(request.request_id, [])
            self._write(request, start, request.num_computed_tokens, drafts)
        for request, _ in requests:
            tokens = [*request.token_ids, *output.scheduled_spec_decode_tokens.get(request.request_id, [])]
            table, size = self.tables[request.request_id], self.scheduler.kv.block_size
            for position in range(request.num_computed_tokens):
                expected = (request.cache_salt, tuple(tokens[: position + 1]))
                found = self.content.get((table[position // size], position % size))
                assert found == expected, f"{request} reads at {position} what was never written there for it"

    def peers_write(self) -> None:
        """Whoever may still write does it now, and garbage: nobody may read that."""
        if isinstance(self.scheduler.connector, FakeConnector):
            for request_id, block_ids in self.scheduler.connector.writable.items():
                for block_id in block_ids:
                    for offset in range(self.scheduler.kv.block_size):
                        self.content[block_id, offset] = f"garbage of {request_id}'s peer"

    def peers_read(self) -> None:
        """Whoever may still read finds what was there when it was told so."""
        if isinstance(self.scheduler.connector, FakeConnector):
            readable = self.scheduler.connector.readable
            for request_id in self.found.keys() - readable.keys():
                del self.found[request_id]
            for request_id, block_ids in readable.items():
                now = [self.content.get((i, k)) for i in block_ids for k in range(self.scheduler.kv.block_size)]
                assert self.found.setdefault(request_id, now) == now, f"{request_id}'s peer finds other tokens"

    def _land(self, transfers: KVConnectorOutput) -> None:
        """Remote data arrives in the blocks of those who wait for it."""
        for request_id in transfers.finished_recving & self.scheduler.loading:
            request = self.scheduler.requests[request_id]
            self._write(request, request.num_computed_tokens - request.num_external_tokens, request.num_computed_tokens)

    def step(self, tokens: dict[str, int] | None = None) -> SchedulerOutput:
        """A whole step. `tokens` says what is sampled for whom; others get fresh ones. Of a draft the first
        `self.right` tokens are right, and then what is sampled follows."""
        output = self.schedule()
        self.peers_write()
        self.execute(output)
        self.peers_read()
        if self.transfers:
            connector = self.scheduler.connector
            over = self.transfers.finished_sending | self.transfers.finished_recving | self.transfers.failed_recving
            if isinstance(connector, FakeConnector):
                for request_id in over:
                    connector.writable.pop(request_id, None)
                    connector.readable.pop(request_id, None)
            self._land(self.transfers)
        sampled = {}
        for request_id in output.num_scheduled_tokens:
            request = self.scheduler.requests[request_id]
            samples = request.num_computed_tokens >= request.num_tokens
            masked = samples and request.sampling_params.structured_outputs is not None
            assert (request_id in output.grammar_bitmask) == masked, "S12: a mask where something is sampled"
            if samples:
                self.next_token += 1
                drafts = output.scheduled_spec_decode_tokens.get(request_id, [])
                right = drafts[: self.right]
                self.computed[request_id] -= len(drafts) - len(right)
                sampled[request_id] = [*right, (tokens or {}).get(request_id, self.next_token)]
        news = self.scheduler.update_from_output(output, ModelRunnerOutput(sampled, {}, self.transfers))
        self.transfers = None
        self.take(news)
        self.peers_read()
        self.scheduler.check_invariants()
        return output

    def fail_step(self) -> None:
        """A step is planned, and the computation does not finish."""
        self.scheduler.take_back(self.schedule())
        self.scheduler.check_invariants()

    def take(self, news: list[EngineCoreOutput]) -> None:
        for item in news:
            self.outputs.setdefault(item.request_id, []).extend(item.new_token_ids)
            if item.finish_reason:
                self.reasons[item.request_id] = item.finish_reason
                self.ends.append((item.request_id, item.turn, item.finish_reason))

    def run(self, max_steps: int = 10_000) -> int:
        """Until nothing is unfinished; returns how many steps it took."""
        for steps in range(max_steps):
            if not self.scheduler.has_unfinished_requests():
                return steps
            self.step()
        raise AssertionError(f"not finished after {max_steps} steps: {self.scheduler!r}")
