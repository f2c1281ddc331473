"""A service under observation, for lesson 16: requests that arrive over time at a real engine, or at a real scheduler alone.

What is decided, sampled and counted is the engine's own. The time is not: a step lasts as long as the roofline of cluster.py
says. So two runs can be compared number by number, on any machine, however busy it is.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanopd.config import SamplingParams
from nanopd.core.output import SchedulerStats
from nanopd.core.scheduler import Scheduler
from nanopd.request import Request
from nanopd.trace.events import AnyEvent, Event, Planned, Sampled
from nanopd.trace.file import Line

from . import drive
from .cluster import Machine

MACHINE = Machine()


@dataclass(frozen=True)
class Job:
    """A request, and when it comes, in seconds."""

    name: str
    at: float
    prompt: Sequence[int]
    max_tokens: int


@dataclass
class Run:
    """What was seen of a run: what clients feel, what /metrics counts, and the trace."""

    came: dict[str, list[float]] = field(default_factory=dict)  # the times of each request's tokens
    at: dict[str, float] = field(default_factory=dict)  # its arrival
    tokens: dict[str, list[int]] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    stats: SchedulerStats = field(default_factory=SchedulerStats)
    steps: int = 0
    most_waiting: int = 0  # the longest queue after a step
    end: float = 0.0

    @property
    def ttft(self) -> list[float]:
        return [times[0] - self.at[name] for name, times in self.came.items()]

    @property
    def gaps(self) -> list[float]:
        """The times between two tokens of one request, of all requests: ITL, one by one."""
        return [b - a for times in self.came.values() for a, b in itertools.pairwise(times)]


def observe(scheduler: Scheduler, step: Callable[[], Any], jobs: Sequence[Job], machine: Machine = MACHINE) -> Run:
    """Lets jobs come and steps run until all are done. `step` takes one whole step with this scheduler."""
    run, events, coming = Run(), list[Event](), sorted(jobs, key=lambda job: job.at)
    scheduler.trace = scheduler.kv.trace = events.append
    now = 0.0

    def note(at: float, some: Sequence[Any]) -> None:
        kinds: Sequence[AnyEvent] = some
        run.lines += [Line(at, run.steps, event) for event in kinds]

    while coming or scheduler.has_unfinished_requests():
        if not scheduler.has_unfinished_requests():
            now = max(now, coming[0].at)
        while coming and coming[0].at <= now:
            job = coming.pop(0)
            params = SamplingParams(temperature=0, max_tokens=job.max_tokens, ignore_eos=True, seed=0)
            scheduler.add_request(Request(job.name, job.prompt, params))
            run.at[job.name], run.came[job.name], run.tokens[job.name] = job.at, [], []
            note(job.at, events)
            events.clear()
        step()
        planned = next(i for i, event in enumerate(events) if isinstance(event, Planned))
        note(now, events[: planned + 1])
        plan = events[planned]
        assert isinstance(plan, Planned)
        now += machine.step_seconds((start, n) for _, start, n in plan.scheduled)
        note(now, events[planned + 1 :])
        for event in events:
            if isinstance(event, Sampled):
                for name, tokens in event.token_ids.items():
                    run.came[name] += [now] * len(tokens)
                    run.tokens[name] += tokens
        events.clear()
        run.steps += 1
        run.most_waiting = max(run.most_waiting, scheduler.stats().num_waiting)
    run.stats, run.end = scheduler.stats(), now
    return run


def plan_only(jobs: Sequence[Job], num_blocks: int = 2000, **options: Any) -> Run:
    """The real scheduler over a real pool with blocks of 16 tokens, without a model. `options`: fields of EngineConfig."""
    scheduler = drive.scheduler(num_blocks, 16, 4096, **options)
    return observe(scheduler, lambda: drive.step(scheduler), jobs)


def real_engine(model: Path, jobs: Sequence[Job], num_blocks: int = 2000, **options: Any) -> Run:
    """A real engine, which computes every token."""
    from nanopd.config import EngineConfig
    from nanopd.engine.core import EngineCore

    core = EngineCore(EngineConfig(model=str(model), dtype="float32", num_blocks=num_blocks, **options))
    return observe(core.scheduler, core.step, jobs)
