"""Benchmarks. Each returns plain numbers; `show` prints them for people or as one JSON object a line.

Machines are noisy: compare two things in one run, and trust ratios and medians, not single figures.
"""

import json
import random
import statistics
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nanopd.config import SamplingParams, UserError
from nanopd.core.kv_cache import KVCacheManager
from nanopd.core.output import ModelRunnerOutput
from nanopd.core.scheduler import Scheduler
from nanopd.request import Request

if TYPE_CHECKING:
    from nanopd.engine.llm import LLM


def show(row: dict[str, Any], as_json: bool) -> None:
    """Prints one result."""
    if as_json:
        print(json.dumps(row), flush=True)
    else:
        print(
            "  ".join(
                f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
            )
        )


def _range(text: str, option: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    try:
        bounds = int(low), int(high or low)
        if 1 <= bounds[0] <= bounds[1]:
            return bounds
    except ValueError:
        pass
    raise UserError(f"{option} is {text!r}; it must be a number of tokens or a range like 32-256.")


def _percentiles(name: str, seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {f"{name}_p{p}_ms": 1000 * ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (50, 90, 99)}


def offline(llm: "LLM", num_requests: int, input_len: str, output_len: str, shared_prefix: int) -> dict[str, Any]:
    """All requests at once through one engine; prompts are random tokens, the first `shared_prefix` the same for all."""
    rng = random.Random(llm.config.seed)
    vocab_size = llm.core.model.config.vocab_size
    inputs, outputs = _range(input_len, "--input-len"), _range(output_len, "--output-len")
    prefix = [rng.randrange(vocab_size) for _ in range(shared_prefix)]
    work = []
    for _ in range(num_requests):
        prompt = [rng.randrange(vocab_size) for _ in range(rng.randint(*inputs))]
        max_tokens = rng.randint(*outputs)
        work.append((prefix + prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)))
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=2))  # warm up
    before, start = llm.stats(), time.perf_counter()
    results = llm.generate([prompt for prompt, _ in work], [params for _, params in work])
    seconds = time.perf_counter() - start
    after = llm.stats()
    metrics = [r.metrics.as_dict(len(r.outputs[0].token_ids)) for r in results]
    num_input, num_output = sum(len(p) for p, _ in work), sum(len(r.outputs[0].token_ids) for r in results)
    return {
        "engine": "nanopd",
        "model": str(llm.config.model or "default"),
        "dtype": str(llm.core.dtype).removeprefix("torch."),
        "requests": num_requests,
        "input_tokens": num_input,
        "output_tokens": num_output,
        "seconds": seconds,
        "output_tokens_per_s": num_output / seconds,
        "input_tokens_per_s": num_input / seconds,
        "computed_tokens": after.num_scheduled_tokens - before.num_scheduled_tokens,
        "cached_tokens": after.prefix_cache_hits - before.prefix_cache_hits,
        "preemptions": after.num_preemptions - before.num_preemptions,
        **_percentiles("ttft", [m["time_to_first_token"] or 0.0 for m in metrics]),
        **_percentiles("itl", [m["inter_token_latency"] or 0.0 for m in metrics]),
    }


def scheduler(num_steps: int = 64) -> Iterator[dict[str, Any]]:
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
    kv = KVCacheManager(num_blocks, block_size)
    core = Scheduler(
        kv, max_model_len=4096, max_num_seqs=num_running, max_num_batched_tokens=max(2048, 2 * num_running)
    )
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
            {i: 7 for i in plan.num_scheduled_tokens if core.requests[i].num_computed_tokens >= prompt_len}
        )
        answered = time.perf_counter()
        core.update_from_output(plan, answer)
        if plan.total_num_scheduled_tokens == num_running and not plan.scheduled_new_reqs:
            times.append(time.perf_counter() - answered + planned - start)
    return times
