"""Microseconds that the scheduler takes, with no model behind it: `nanopd bench scheduler`."""

import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

from nanopd.config import EngineConfig, SamplingParams
from nanopd.core.kv_cache import KVCacheManager
from nanopd.core.output import ModelRunnerOutput
from nanopd.core.scheduler import Scheduler
from nanopd.request import Request


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
        times = _decode_steps(num_running, num_waiting, num_blocks, num_steps)
        median = statistics.median(times)
        yield {
            "bench": "scheduler",
            "running": num_running,
            "waiting": num_waiting,
            "blocks": num_blocks,
            "us_per_step": 1e6 * median,
            "us_per_request": 1e6 * median / num_running,
        }


def _decode_steps(num_running: int, num_waiting: int, num_blocks: int, num_steps: int) -> list[float]:
    """Seconds of each of `num_steps` steps in which `num_running` requests decode one token each."""
    block_size, prompt_len = 16, 128
    config = EngineConfig(max_num_seqs=num_running, max_num_batched_tokens=max(2048, 2 * num_running))
    core = Scheduler(config, KVCacheManager(num_blocks, block_size), max_model_len=4096)
    params = SamplingParams(max_tokens=4000, ignore_eos=True, seed=0)
    rng = random.Random(0)
    for i in range(num_running + num_waiting):
        core.add_request(Request(str(i), [rng.randrange(50_000) for _ in range(prompt_len)], params))
    times: list[float] = []
    while len(times) < num_steps:
        start = time.perf_counter()
        plan = core.schedule()
        planned = time.perf_counter()
        answer = ModelRunnerOutput(
            {i: [7] for i in plan.num_scheduled_tokens if core.requests[i].num_computed_tokens >= prompt_len}
        )
        answered = time.perf_counter()
        core.update_from_output(plan, answer)
        if plan.total_num_scheduled_tokens == num_running and not plan.scheduled_new_reqs:
            times.append(time.perf_counter() - answered + planned - start)
    return times
