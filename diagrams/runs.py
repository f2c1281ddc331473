"""Small real runs of the scheduler and the block pool, for pictures: no model, made-up tokens, every event kept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nanopd.config import EngineConfig, SamplingParams
from nanopd.core.kv_cache import KVCacheManager
from nanopd.core.output import ModelRunnerOutput, SchedulerOutput
from nanopd.core.scheduler import Scheduler
from nanopd.request import Request
from nanopd.trace.events import Event
from nanopd.trace.file import Header
from nanopd.trace.replay import State


def names_exist(owner: object, *names: str) -> None:
    """A picture that names functions of the code calls this: raises AttributeError when they have got other names."""
    for name in names:
        getattr(owner, name)


def in_order(kv: KVCacheManager, *first: int) -> None:
    """Brings the free queue into this order; the other blocks stand behind."""
    pool = kv.pool
    taken = pool.get_new_blocks(len(pool.blocks))
    pool.free(pool.blocks[i] for i in (*first, *(b.block_id for b in taken if b.block_id not in first)))


@dataclass
class Run:
    """A scheduler, and all that it has told. `order`: of the free queue at the start."""

    num_blocks: int = 64
    block_size: int = 4
    order: Sequence[int] = ()
    config: EngineConfig = field(default_factory=EngineConfig)
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kv = KVCacheManager(self.num_blocks, self.block_size)
        in_order(self.kv, *self.order)
        self.kv.trace = self.events.append
        self.scheduler = Scheduler(self.config, self.kv, 1000)
        self.requests: dict[str, Request] = {}

    def add(self, request_id: str, num_tokens: int, max_tokens: int = 4) -> Request:
        first = 1000 * (ord(request_id) - ord("a") + 1)
        tokens = range(first, first + num_tokens)
        request = Request(request_id, tokens, SamplingParams(max_tokens=max_tokens, seed=0))
        self.requests[request_id] = request
        self.scheduler.add_request(request)
        return request

    def step(self) -> SchedulerOutput:
        """Whoever has caught up samples a token."""
        plan = self.scheduler.schedule()
        caught_up = [
            i for i in plan.num_scheduled_tokens if self.requests[i].num_computed_tokens == self.requests[i].num_tokens
        ]
        self.scheduler.update_from_output(plan, ModelRunnerOutput({i: [7] for i in caught_up}))
        self.scheduler.check_invariants()
        return plan

    def moments(self, *wanted: Callable[[Event, State], bool]) -> list[State]:
        """The replayed state right after the event for which each of `wanted` is first true, one after the other."""
        found, rest = [], list(wanted)
        state = self._fresh()
        for done, event in enumerate(self.events, 1):
            state.apply(event)
            if rest and rest[0](event, state):
                rest.pop(0)
                found.append(self._at(done))
        assert not rest, "a moment that never came"
        return found

    def _at(self, num_events: int) -> State:
        state = self._fresh()
        for event in self.events[:num_events]:
            state.apply(event)
        return state

    def _fresh(self) -> State:
        config = EngineConfig(block_size=self.block_size)
        state = State(Header("none", None, config, self.num_blocks, 1000, "float32", "kv_first", {}, (0.0, 0.0)))
        in_order(state.kv, *self.order)
        return state
