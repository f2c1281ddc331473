"""Many nodes in virtual time, for lessons 15 and 16: real schedulers, real block pools and the real router's choice; only
how long a step takes is computed instead of waited for.

    requests of a trace --> Router.choose --> Replica: Scheduler + KVCacheManager, step by step
                                              Machine: a roofline says how many seconds a step lasts

Everything is deterministic: no clock is read. What it leaves out is said in lesson 15.
"""

import functools
import heapq
import itertools
import json
import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from nanopd.config import SamplingParams
from nanopd.connector.base import KVConnectorScheduler
from nanopd.core.output import KVConnectorOutput, ModelRunnerOutput, SchedulerOutput
from nanopd.request import Request
from nanopd.serve.config import RouterConfig
from nanopd.serve.router import Node, Router

from . import drive

BLOCK_SIZE = 512  # tokens; that of the Mooncake traces


@dataclass(frozen=True)
class Machine:
    """A GPU and a model, as a roofline: a step lasts as long as its arithmetic or its memory traffic, whichever is longer.

    The numbers stand for a GPU of the H100 kind at a realistic share of its peak, and for a model of the size of Llama 3 8B
    in bfloat16: 32 layers, hidden size 4096, 8 KV heads of 128.
    """

    flops: float = 400e12  # floating-point operations a second
    bandwidth: float = 2.5e12  # bytes a second, from its memory
    link: float = 25e9  # bytes a second, to another node
    overhead: float = 0.002  # seconds of a step that depend on nothing: launches, the scheduler, IPC
    parameters: float = 8e9
    layers: int = 32
    hidden: int = 4096
    kv_bytes: int = 2 * 32 * 8 * 128 * 2  # K and V of one token: layers, KV heads, head dim, two bytes

    def step_seconds(self, pieces: Iterable[tuple[int, int]]) -> float:
        """How long a step lasts. `pieces`: for each request in it the first token to compute, and how many."""
        pieces = list(pieces)
        flops = 2 * self.parameters * sum(n for _, n in pieces)
        flops += 4 * self.layers * self.hidden * sum(n * (start + n / 2) for start, n in pieces)  # attention
        traffic = 2 * self.parameters + self.kv_bytes * sum(start + n for start, n in pieces)
        return self.overhead + max(flops / self.flops, traffic / self.bandwidth)


@dataclass(frozen=True)
class Asked:
    """A request of a trace. `hash_ids`: one for each block of its prompt; equal ids mean equal prefixes up to there."""

    name: str
    at: float  # seconds
    num_tokens: int  # of its prompt
    max_tokens: int
    hash_ids: Sequence[int]

    @functools.cached_property
    def token_ids(self) -> "array[int]":
        """Tokens made from the ids: as many as the prompt has, equal exactly where the ids are."""
        made = (range(BLOCK_SIZE * i, BLOCK_SIZE * (i + 1)) for i in self.hash_ids)
        return array("q", itertools.chain.from_iterable(made))[: self.num_tokens]

    def request(self, max_tokens: int = 1) -> Request:
        """As a scheduler wants it."""
        return Request(self.name, self.token_ids, SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=0))


def read_trace(path: Path) -> list[Asked]:
    """A trace in Mooncake's format, from time 0 on."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    start = rows[0]["timestamp"]
    lengths = ("input_length", "output_length", "hash_ids")
    return [Asked(f"r{i}", (row["timestamp"] - start) / 1000, *(row[k] for k in lengths)) for i, row in enumerate(rows)]


@dataclass
class Outcome:
    """What became of a request. Times are seconds."""

    asked: Asked
    at: float
    node: str = ""  # where it was decoded
    tokens: list[float] = field(default_factory=list)  # when each came
    failed: bool = False  # refused, or cut short

    @property
    def ttft(self) -> float:
        return self.tokens[0] - self.at if self.tokens else math.inf

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.tokens)]

    @property
    def itl(self) -> float:
        """The mean gap between its tokens."""
        return sum(self.gaps) / max(1, len(self.gaps))

    def within(self, ttft: float, itl: float) -> bool:
        """Does it keep this SLO?"""
        return not self.failed and self.ttft <= ttft and self.itl <= itl


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that is at least as large as this share of all of them (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


class Remote(KVConnectorScheduler):
    """The scheduler half of a connector, as little of it as a P or a D needs here; `Cluster` moves the time."""

    def __init__(self, found: Callable[[str, int], None]) -> None:
        self.expected: set[str] = set()  # on a D: requests whose prompt a P computes
        self.sending: set[str] = set()  # on a P: requests whose blocks a D has still to fetch
        self._found = found  # is told of a D's request that has its blocks, and how many tokens are to come

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if request.request_id not in self.expected:
            return 0, False
        return request.num_prompt_tokens - num_computed_tokens, True

    def update_state_after_alloc(self, request: Request, block_ids: list[int], num_external_tokens: int) -> None:
        if request.request_id in self.expected:
            self.expected.remove(request.request_id)
            self._found(request.request_id, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        return None

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return request.request_id in self.sending, None


class Replica:
    """A node: a scheduler and its pool; the step it is in, if any."""

    def __init__(self, machine: Machine, num_blocks: int, connector: Remote | None = None, **options: Any) -> None:
        self.machine, self.connector = machine, connector
        self.scheduler = drive.scheduler(num_blocks, BLOCK_SIZE, num_blocks * BLOCK_SIZE, connector, **options)
        self.plan: SchedulerOutput | None = None  # of the step it is in
        self.came = KVConnectorOutput()  # transfers that have ended since the last step
        self.busy = 0.0  # seconds spent in steps
        self.steps = 0

    def begin(self) -> float | None:
        """Plans a step; returns how long it will last. None: there is nothing to compute."""
        scheduler = self.scheduler
        while True:
            if self.came != KVConnectorOutput():
                came, self.came = self.came, KVConnectorOutput()
                scheduler.update_from_output(SchedulerOutput(), ModelRunnerOutput({}, {}, came))
            if not scheduler.requests:
                return None
            plan = scheduler.schedule()
            if plan.total_num_scheduled_tokens:
                break
            if not plan.preempted_req_ids and self.came == KVConnectorOutput():
                return None
        self.plan = plan
        planned = plan.num_scheduled_tokens.items()
        seconds = self.machine.step_seconds((scheduler.requests[i].num_computed_tokens - n, n) for i, n in planned)
        self.busy += seconds
        self.steps += 1
        return seconds

    def end(self) -> list[tuple[str, bool]]:
        """The step has run. Returns the requests that got a token, and whether it was their last."""
        assert self.plan
        plan, self.plan, requests = self.plan, None, self.scheduler.requests
        caught_up = (requests[i] for i in plan.num_scheduled_tokens if i in requests)
        sampled = {r.request_id: [7 + r.num_tokens] for r in caught_up if r.num_computed_tokens == r.num_tokens}
        news = self.scheduler.update_from_output(plan, ModelRunnerOutput(sampled))
        return [(item.request_id, item.finish_reason is not None) for item in news]

    def holds(self, asked: Asked) -> int:
        """How many blocks of this prompt, from its beginning on, are in its prefix cache now."""
        request = asked.request()
        self.scheduler.kv.update_block_hashes(request)
        cached = map(self.scheduler.kv.pool.get_cached_block, request.block_hashes)
        return sum(1 for _ in itertools.takewhile(lambda block: block is not None, cached))


class Cluster:
    """Nodes behind the real router. `decode` nodes finish requests; with `prefill` nodes those compute the prompts (P/D).

    Args:
        policy: a name of `nanopd.serve.router.POLICIES`.
        num_blocks: of each node's pool.
        most_in_flight: requests that a node takes at a time; it refuses those above it, as a server does with 429.
        options: fields of EngineConfig, for each node.
    """

    def __init__(
        self,
        policy: str,
        num_nodes: int,
        num_prefill: int = 0,
        num_blocks: int = 800,
        most_in_flight: int = 10**6,
        machine: Machine = Machine(),
        **options: Any,
    ) -> None:
        names = [f"http://node{i}" for i in range(num_nodes)]
        config = RouterConfig(prefill=tuple(names[:num_prefill]), decode=tuple(names[num_prefill:]), policy=policy)
        self.router, self.machine, self.most_in_flight = Router(config), machine, most_in_flight
        self.now, self._count = 0.0, itertools.count()
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._new_replica = functools.partial(Replica, machine, num_blocks, **options)
        self._disaggregated = num_prefill > 0
        self.replicas = {node: self._start() for node in self.router.nodes.values()}
        for node in self.replicas:
            node.health = {"role": "both"}
        self.outcomes: dict[str, Outcome] = {}
        self.most_uneven = 0  # the largest difference in requests in flight that there was between two nodes
        self._where: dict[str, tuple[Node, Node | None]] = {}  # of requests in flight
        self._computed: set[str] = set()  # prompts that a P has ready
        self._wanted: dict[str, int] = {}  # tokens that a D waits for
        self._link_free: dict[Node, float] = {}

    def name(self, node: Node) -> str:
        return node.url.removeprefix("http://")

    def _start(self) -> Replica:
        return self._new_replica(connector=Remote(self._allocated) if self._disaggregated else None)

    def in_flight(self) -> list[int]:
        """Requests at each node that decodes and is up."""
        return [len(node.calls) for node in self.router.decode if node.health]

    def run(
        self, trace: Iterable[Asked], speed: float = 1.0, failures: Sequence[tuple[float, int, float]] = ()
    ) -> list[Outcome]:
        """Plays a trace, `speed` times as fast as it was. `failures`: at this second this node dies, and is back so many
        seconds later with nothing cached."""
        for asked in trace:
            self.outcomes[asked.name] = Outcome(asked, asked.at / speed)
            self._at(asked.at / speed, self._send, asked)
        for second, number, seconds in failures:
            node = [*self.replicas][number]
            self._at(second, self._die, node)
            self._at(second + seconds, self._back, node)
        # The router remembers 2**14 pieces of 16 tokens or so. Here a piece is a block: as many tokens are 512 of them.
        with patch("nanopd.serve.router.MAX_PIECES", 2**14 * 16 // BLOCK_SIZE):
            while self._events:
                self.now, _, happen, about = heapq.heappop(self._events)
                happen(*about)
        for replica in self.replicas.values():
            replica.scheduler.check_invariants()
            assert not replica.scheduler.requests and not replica.scheduler.reclaiming
        return [*self.outcomes.values()]

    def _at(self, second: float, happen: Callable[..., None], *about: Any) -> None:
        heapq.heappush(self._events, (second, next(self._count), happen, about))

    # ---------------------------------------------------------------- a request's way, as Router.forward has it

    def _send(self, asked: Asked) -> None:
        name, chain, outcome = asked.name, list(asked.hash_ids), self.outcomes[asked.name]
        able = [node for node in self.router.decode if node.health and len(node.calls) < self.most_in_flight]
        d = self.router.choose(able, chain)
        if d is None:
            outcome.failed = True
            return
        p = self.router.choose([node for node in self.router.prefill if node.health], chain)
        outcome.node, self._where[name] = self.name(d), (d, p)
        for node, max_tokens in ((d, asked.max_tokens), (p, 1)):
            if node is None:
                continue
            calls: set[Any] = node.calls  # only their number counts
            calls.add(name)
            replica = self.replicas[node]
            replica.scheduler.add_request(asked.request(max_tokens))
            if replica.connector and p:
                (replica.connector.sending if node is p else replica.connector.expected).add(name)
            self._wake(node)
        in_flight = self.in_flight()
        self.most_uneven = max(self.most_uneven, max(in_flight) - min(in_flight))

    def _wake(self, node: Node) -> None:
        replica = self.replicas[node]
        if replica.plan is None and (seconds := replica.begin()) is not None:
            self._at(self.now + seconds, self._step_ended, node, replica)

    def _step_ended(self, node: Node, replica: Replica) -> None:
        if self.replicas[node] is not replica:
            return  # it has died in this step
        for name, last in replica.end():
            d, p = self._where[name]
            if node is p:  # the prompt is computed; its token is D's to give
                self._computed.add(name)
                self._transfer(name)
                continue
            outcome = self.outcomes[name]
            outcome.tokens.append(self.now)
            if p:
                p.calls -= {name}
            if last:
                d.calls -= {name}
                del self._where[name]
        self._wake(node)

    # ---------------------------------------------------------------- P/D

    def _allocated(self, name: str, num_tokens: int) -> None:
        self._wanted[name] = num_tokens
        self._transfer(name)

    def _transfer(self, name: str) -> None:
        """When the prompt is computed and D has blocks for it: one transfer after the other on P's link."""
        if name in self._computed and name in self._wanted:
            self._computed.remove(name)
            _, p = self._where[name]
            assert p
            start = max(self.now, self._link_free.get(p, 0.0))
            self._link_free[p] = start + self._wanted.pop(name) * self.machine.kv_bytes / self.machine.link
            self._at(self._link_free[p], self._transferred, name)

    def _transferred(self, name: str) -> None:
        d, p = self._where[name]
        assert p
        connector = self.replicas[p].connector
        assert connector
        connector.sending.remove(name)
        self.replicas[p].came.finished_sending.add(name)
        self.replicas[d].came.finished_recving.add(name)
        self._wake(p)
        self._wake(d)

    # ---------------------------------------------------------------- failures, of clusters without P/D

    def _back(self, node: Node) -> None:
        node.health = {"role": "both"}

    def _die(self, node: Node) -> None:
        """P8: a request that has given nothing yet is tried elsewhere; for one that has begun, the answer ends here."""
        node.health, node.seen = {}, {}
        self.replicas[node] = self._start()
        lost = sorted(name for name, (d, _) in self._where.items() if d is node)
        node.calls.clear()
        for name in lost:
            del self._where[name]
            if self.outcomes[name].tokens:
                self.outcomes[name].failed = True
            else:
                self._send(self.outcomes[name].asked)


def hit_rate(cluster: Cluster) -> float:
    """Share of the prompt tokens looked up, over all nodes, that their prefix caches had."""
    stats = [replica.scheduler.stats() for replica in cluster.replicas.values()]
    return sum(s.prefix_cache_hits for s in stats) / sum(s.prefix_cache_queries for s in stats)
