"""Traces of a scheduler without a model, with what the engine itself held after each step."""

import dataclasses
from pathlib import Path
from typing import Any

from nanopd.core.scheduler import Scheduler
from nanopd.trace.events import Event
from nanopd.trace.file import FileTracer, Header
from tests.trace.compare import of_engine


def trace_to(path: Path, scheduler: Scheduler, **header: Any) -> dict[int, dict[str, Any]]:
    """From now on the scheduler tells a file what it does. Returns a dict that fills as it goes: for each step that the
    trace has, what the engine held after it."""
    fields = {
        "model": "none",
        "role": None,
        "config": dataclasses.replace(scheduler.config, block_size=scheduler.kv.block_size),
        "num_blocks": len(scheduler.kv.pool.blocks),
        "max_model_len": scheduler.max_model_len,
        "dtype": "float32",
        "kv_layout": "kv_first",
        "strides": {"layer": 65536, "kv": 32768, "block": 512, "slot": 128, "head": 64},
        "clock": (1000.0, 10.0),
    }
    tracer = FileTracer(str(path), Header(**fields | header))
    states: dict[int, dict[str, Any]] = {}

    def trace(event: Event) -> None:
        step = tracer.step
        tracer(event)
        if tracer.step > step:
            states[step] = of_engine(scheduler)

    scheduler.kv.trace = scheduler.trace = trace
    return states
