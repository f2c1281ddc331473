"""What a trace tells is the truth, and all of it: replayed, it gives the engine's own state after every step."""

from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from nanopd.config import UserError
from nanopd.core.kv_cache import KVCacheManager
from nanopd.trace.events import Allocated, Arrived, Cached, Moved, Planned
from nanopd.trace.file import Line, read
from nanopd.trace.replay import State, replay
from tests.core import test_state_machine
from tests.core.drive import Driver, make_request, make_scheduler
from tests.trace.compare import of_replay
from tests.trace.record import trace_to


class TracedMachine(test_state_machine.SchedulerMachine):
    """A random life of a scheduler; when it ends, its trace is replayed."""

    path: Path
    seen: ClassVar[set[str]]  # kinds of events and statuses, over all lives

    def teardown(self) -> None:
        super().teardown()
        if not hasattr(self, "scheduler"):
            return
        header, lines = read(self.path)
        told = {step: of_replay(state) for step, _, state in replay(header, lines)}
        for step, held in self.scheduler.states.items():
            assert told[step] == held, f"step {step}"
        for line in lines:
            name = line.event.status if isinstance(line.event, Moved) else type(line.event).__name__
            self.seen.add(name)


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[TracedMachine]:
    def make(*args, **options):
        scheduler = make_scheduler(*args, **options)
        scheduler.states = trace_to(tmp_path / "trace.jsonl", scheduler)
        return scheduler

    TracedMachine.path, TracedMachine.seen = tmp_path / "trace.jsonl", set()
    monkeypatch.setattr(test_state_machine, "make_scheduler", make)
    return TracedMachine


def run(machine: type[TracedMachine], examples: int, steps: int) -> None:
    options = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=steps, **options))


def test_replaying_gives_the_state_of_the_engine_after_every_step(traced: type[TracedMachine]):
    run(traced, 200, 40)
    kinds = {
        "Arrived",
        "Dropped",
        "Allocated",
        "Refused",
        "Cached",
        "Uncached",
        "Freed",
        "Quarantined",
        "Skipped",
        "Planned",
    }
    statuses = {
        "running",
        "preempted",
        "waiting for remote KVs",
        "waiting for grammar",
        "waiting for input",
        "waiting",
        "stop",
        "length",
        "abort",
        "error",
    }
    assert kinds | statuses | {"Sampled", "Stepped"} <= traced.seen, "the random lives did not come to all there is"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_replaying_gives_the_state_of_the_engine_for_long(traced: type[TracedMachine]):
    run(traced, 1500, 100)


def tight(path: Path) -> None:
    """Three requests in a pool for two: one is preempted."""
    scheduler = make_scheduler(num_blocks=7, block_size=4)
    trace_to(path, scheduler)
    for name in "abc":
        scheduler.add_request(make_request(name, prompt=7, max_tokens=6))
    Driver(scheduler).run()


@pytest.mark.parametrize("forget", [Arrived, Cached, Moved, Planned])
def test_a_trace_that_leaves_something_out_is_found_out(tmp_path: Path, forget: type):
    tight(tmp_path / "t")
    header, lines = read(tmp_path / "t")
    whole = [of_replay(state) for _, _, state in replay(header, lines)]
    try:
        partial = [of_replay(s) for _, _, s in replay(header, [x for x in lines if not isinstance(x.event, forget)])]
    except (KeyError, RuntimeError, UserError):
        return
    assert partial != whole


def test_blocks_that_are_not_next_in_the_free_queue_are_refused(tmp_path: Path):
    tight(tmp_path / "t")
    header, lines = read(tmp_path / "t")
    state = State(header)
    state.kv.pool.get_new_blocks(1)
    first = next(line.event for line in lines if isinstance(line.event, Allocated))
    with pytest.raises(UserError, match="not complete"):
        state.apply(first)


def test_what_has_not_changed_since_the_last_step_is_not_written(tmp_path: Path):
    from nanopd.core.output import KVConnectorOutput
    from tests.core.drive import FakeConnector

    connector = FakeConnector()
    scheduler = make_scheduler(connector=connector)
    states = trace_to(tmp_path / "t", scheduler)
    connector.remote["a"] = 8
    scheduler.add_request(make_request("a", prompt=8, max_tokens=2))
    driver = Driver(scheduler)
    for _ in range(1000):  # it waits for its blocks
        driver.step()
    driver.transfers = KVConnectorOutput(finished_recving={"a"})
    driver.run()
    header, lines = read(tmp_path / "t")
    steps = [step for step, _, _ in replay(header, lines)]
    assert steps == list(range(len(states)))
    assert len(steps) < 10
    assert [of_replay(state) for _, _, state in replay(header, lines)] == list(states.values())


def test_it_costs_nothing_when_nobody_listens():
    """The null tracer is called, and nothing is kept or written."""
    from nanopd.trace.events import ignore

    assert KVCacheManager(4, 4).trace is ignore
    assert make_scheduler().trace is ignore
    assert ignore(Planned([])) is None


def test_a_line_is_a_time_a_step_and_an_event(tmp_path: Path):
    tight(tmp_path / "t")
    _, lines = read(tmp_path / "t")
    assert all(isinstance(line, Line) for line in lines)
    assert [line.time for line in lines] == sorted(line.time for line in lines)
    (preempted,) = [line.event for line in lines if isinstance(line.event, Moved) and line.event.status == "preempted"]
    assert (preempted.request_id, preempted.rule, preempted.by) == ("c", "S3 case A", "b")
