"""The loop of the engine core's process: how long it waits for messages between two steps."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

from nanopd.core.output import SchedulerStats
from nanopd.engine.process import run


class Enough(Exception):
    """The loop has done what it was to do."""


@pytest.mark.parametrize(
    ("requests", "news", "reclaiming", "wait_ms"),
    [(1, False, 0, 0), (0, True, 1, 0), (0, False, 1, 10), (0, False, 0, 1000), (1, False, 1, 0)],
)
def test_how_long_it_waits(requests: int, news: bool, reclaiming: int, wait_ms: int):
    """A peer that stands still keeps blocks in `reclaiming` for as long as it likes (P4): that must not cost a core. But
    what there is to compute or to tell waits for nothing."""
    waits: list[int] = []
    steps: list[None] = []

    def poll(milliseconds: int) -> int:
        waits.append(milliseconds)
        if len(waits) == 3:
            raise Enough
        return 0

    def step() -> list[Any]:
        steps.append(None)
        return []

    scheduler = SimpleNamespace(
        num_active=requests, reclaiming=set(range(reclaiming)), connector=SimpleNamespace(has_news=lambda: news)
    )
    core: Any = SimpleNamespace(
        scheduler=scheduler,
        step=step,
        has_unfinished_requests=lambda: bool(requests or reclaiming or news),
        stats=lambda: (SchedulerStats(), None),
    )
    socket: Any = SimpleNamespace(poll=poll, send=lambda raw: None)
    with pytest.raises(Enough):
        run(core, socket, os.getppid())
    assert waits == [wait_ms] * 3
    assert len(steps) == (2 if requests or reclaiming or news else 0)
