"""Throughput and latencies of one batch of random prompts, all arriving at once: `nanopd bench offline`."""

import random
import time
from typing import Any

from nanopd.config import SamplingParams, UserError
from nanopd.engine.llm import LLM


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


def measure(
    llm: LLM, num_requests: int, inputs: tuple[int, int], outputs: tuple[int, int], shared_prefix: int
) -> dict[str, Any]:
    """All requests at once through one engine; prompts are random tokens, the first `shared_prefix` the same for all.

    inputs, outputs: fewest and most tokens of a prompt, without the prefix, and of an answer.
    """
    rng = random.Random(llm.config.seed)
    vocab_size = llm.core.model.config.vocab_size
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
