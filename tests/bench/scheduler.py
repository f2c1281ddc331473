"""Microseconds that the scheduler takes, with no model behind it: `nanopd bench scheduler`."""

import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanopd.config import EngineConfig, SamplingParams
from nanopd.core.kv_cache import KVCacheManager
from nanopd.core.output import ModelRunnerOutput
from nanopd.core.scheduler import Scheduler
from nanopd.models.loader import resolve_model
from nanopd.request import Request

from .worker import Worker, started


def measure(num_steps: int = 64) -> Iterator[dict[str, Any]]:
    """The scheduler alone, decoding: `schedule` + `update_from_output` per request it schedules."""
    for num_running, num_waiting, num_blocks in (
        (256, 10_000, 20_000),
        (16, 10_000, 20_000),
        (64, 10_000, 20_000),
        (1024, 10_000, 100_000),
        (256, 0, 20_000),
        (256, 10_000, 100_000),
        (16, 10_000, 1_000),
        (16, 10_000, 100_000),
    ):
        steps = decode_steps(num_running, num_waiting, num_blocks)
        median = statistics.median(itertools.islice(steps, num_steps))
        yield {
            "bench": "scheduler",
            "running": num_running,
            "waiting": num_waiting,
            "blocks": num_blocks,
            "us_per_step": 1e6 * median,
            "us_per_request": 1e6 * median / num_running,
        }


def decode_steps(num_running: int, num_waiting: int, num_blocks: int) -> Iterator[float]:
    """Seconds of each step in which `num_running` requests decode one token each."""
    block_size, prompt_len = 16, 128
    config = EngineConfig(max_num_seqs=num_running, max_num_batched_tokens=max(2048, 2 * num_running))
    core = Scheduler(config, KVCacheManager(num_blocks, block_size), max_model_len=4096)
    params = SamplingParams(max_tokens=4000, ignore_eos=True, seed=0)
    rng = random.Random(0)
    for i in range(num_running + num_waiting):
        core.add_request(Request(str(i), [rng.randrange(50_000) for _ in range(prompt_len)], params))
    while True:
        start = time.perf_counter()
        plan = core.schedule()
        planned = time.perf_counter()
        answer = ModelRunnerOutput(
            {i: [7] for i in plan.num_scheduled_tokens if core.requests[i].num_computed_tokens >= prompt_len}
        )
        answered = time.perf_counter()
        core.update_from_output(plan, answer)
        if plan.total_num_scheduled_tokens == num_running and not plan.scheduled_new_reqs:
            yield time.perf_counter() - answered + planned - start


def against(peer_python: str, rounds: int, logs: Path) -> Iterator[dict[str, Any]]:
    """vLLM's scheduler, in its own environment, and ours in turn: microseconds per request, by number running.

    A turn is 16 steps, so each has its share of new blocks and hashes; `ratio` is theirs by ours, the median over pairs of
    turns. What both do is written in peer_scheduler.py.
    """
    model = str(resolve_model(None))
    for running, blocks in ((256, 20_000), (1024, 100_000)):
        options = json.dumps({"running": running, "blocks": blocks, "model": model})
        with (
            started(peer_python, "peer_scheduler.py", "vllm", options, {}, logs) as theirs,
            started(sys.executable, "peer_scheduler.py", "nanopd", options, {}, logs) as ours,
        ):
            turns = [[_us_per_request(worker, running) for worker in (theirs, ours)] for _ in range(rounds + 1)][1:]
            yield {
                "bench": "scheduler",
                "peer": theirs.what,
                "running": running,
                "blocks": blocks,
                "rounds": rounds,
                "their_us_per_request": statistics.median(t for t, _ in turns),
                "our_us_per_request": statistics.median(o for _, o in turns),
                "ratio": statistics.median(t / o for t, o in turns),
                "ratio_least": min(t / o for t, o in turns),
                "ratio_most": max(t / o for t, o in turns),
            }


def _us_per_request(worker: Worker, running: int, num_steps: int = 16) -> float:
    seconds: list[float] = worker.turn({"steps": num_steps})["seconds"]
    return 1e6 * sum(seconds) / num_steps / running
