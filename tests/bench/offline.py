"""Throughput and latencies of one batch of random prompts, all arriving at once: `nanopd bench offline`."""

import random
import time
from collections import deque
from contextlib import nullcontext
from typing import Any

from nanopd.config import SamplingParams, UserError
from nanopd.engine.llm import LLM

from . import split


def bounds(text: str, option: str) -> tuple[int, int]:
    """What `text` says, "64" or "32-256". Raises UserError that names the option."""
    low, _, high = text.partition("-")
    try:
        least, most = int(low), int(high or low)
        if 1 <= least <= most:
            return least, most
    except ValueError:
        pass
    raise UserError(f"{option} is {text!r}; it must be a number of tokens or a range like 32-256.")


def _percentiles(name: str, seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {f"{name}_p{p}_ms": 1000 * ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (50, 90, 99)}


Work = list[tuple[list[int], SamplingParams]]


def random_work(
    vocab_size: int,
    num_requests: int,
    inputs: tuple[int, int],
    outputs: tuple[int, int],
    shared_prefix: int,
    seed: int | str,
) -> Work:
    """Prompts of random tokens, the first `shared_prefix` the same for all, and greedy answers that nothing ends early.

    inputs, outputs: fewest and most tokens of a prompt, without the prefix, and of an answer.
    """
    rng = random.Random(seed)
    prefix = [rng.randrange(vocab_size) for _ in range(shared_prefix)]
    work = []
    for _ in range(num_requests):
        prompt = [rng.randrange(vocab_size) for _ in range(rng.randint(*inputs))]
        max_tokens = rng.randint(*outputs)
        work.append((prefix + prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)))
    return work


def measure(llm: LLM, work: Work, concurrency: int | None = None, profile: bool = False) -> dict[str, Any]:
    """Runs `work` through one engine, all of it at once or at most `concurrency` requests at a time.

    ttft: from a request's arrival to its first token; itl: every pause between two tokens of a request. `profile` adds the
    milliseconds that an average step spends in each part of the engine (see split.py), and makes it a little slower.
    """
    llm.core.warm_up()
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=2))  # warm up
    todo, running, results = deque(work), set[str](), []
    last: dict[str, float] = {}  # when a request had its last token
    pauses: list[float] = []
    num_steps = 0
    with split.watch(llm) if profile else nullcontext() as parts:
        before, start = llm.stats(), time.perf_counter()
        while todo or running:
            while todo and len(running) < (concurrency or len(work)):
                results.append(llm.add_request(*todo.popleft()))
                running.add(results[-1].request_id)
            for output in llm.step():
                now = time.perf_counter()
                if output.request_id in last:
                    pauses.append(now - last[output.request_id])
                last[output.request_id] = now
                if output.finished:
                    running.remove(output.request_id)
            num_steps += 1
        seconds, after = time.perf_counter() - start, llm.stats()
    ttfts = [r.metrics.as_dict(1)["time_to_first_token"] or 0.0 for r in results]
    num_input, num_output = sum(len(p) for p, _ in work), sum(len(r.outputs[0].token_ids) for r in results)
    row = {
        "engine": "nanopd",
        "model": str(llm.config.model or "default"),
        "dtype": str(llm.core.dtype).removeprefix("torch."),
        "requests": len(work),
        "input_tokens": num_input,
        "output_tokens": num_output,
        "seconds": seconds,
        "output_tokens_per_s": num_output / seconds,
        "input_tokens_per_s": num_input / seconds,
        "computed_tokens": after.num_scheduled_tokens - before.num_scheduled_tokens,
        "cached_tokens": after.prefix_cache_hits - before.prefix_cache_hits,
        "cascade_saved_tokens": after.cascade_saved_tokens - before.cascade_saved_tokens,
        "preemptions": after.num_preemptions - before.num_preemptions,
        **_percentiles("ttft", ttfts),
        **_percentiles("itl", pauses or [0.0]),
    }
    if parts:
        row |= {"steps": num_steps} | {f"{part}_ms": 1000 * s / num_steps for part, s in parts.seconds.items()}
    return row
