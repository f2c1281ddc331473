"""Benchmarks. Each returns plain numbers; `show` prints them for people or as one JSON object a line.

Machines are noisy: compare two things in one run, and trust ratios and medians, not single figures.
"""

import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from nanopd.config import EngineConfig, SamplingParams, UserError
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
            {i: 7 for i in plan.num_scheduled_tokens if core.requests[i].num_computed_tokens >= prompt_len}
        )
        answered = time.perf_counter()
        core.update_from_output(plan, answer)
        if plan.total_num_scheduled_tokens == num_running and not plan.scheduled_new_reqs:
            times.append(time.perf_counter() - answered + planned - start)
    return times


def kernels(targets: list[str]) -> Iterator[dict[str, Any]]:
    """On a GPU: time of each kernel, against what the chip can do and against torch's attention on the same work.
    Without one: what the compilers make of the kernels for `targets` (none: all), see kernels/aot.py."""
    import torch

    try:
        from nanopd.kernels import aot
        from nanopd.kernels.paged_attention import INTERPRETED
    except ImportError:
        raise UserError("Triton is not installed (it exists for Linux only).") from None
    if unknown := sorted(set(targets) - set(aot.TARGETS)):
        raise UserError(f"Unknown target {', '.join(unknown)}; known are {', '.join(aot.TARGETS)}.")
    if INTERPRETED:
        raise UserError("TRITON_INTERPRET is set, so nothing can be compiled; unset it for this command.")
    if torch.cuda.is_available():
        yield from _kernel_times()
    else:
        for target in targets or list(aot.TARGETS):
            yield from aot.report(target)


def _kernel_times() -> Iterator[dict[str, Any]]:
    """Medians on the current device, in the shapes of Llama-3-8B: 32 / 8 heads of 128, bfloat16, blocks of 16 tokens."""
    import torch
    import torch.nn.functional as F
    import triton.testing

    from nanopd.kernels import kv_store as store
    from nanopd.kernels import paged_attention as attention
    from nanopd.kernels import slot_mapping as slot

    common = {"bench": "kernels", "device": torch.cuda.get_device_name()}
    int32 = partial(torch.tensor, dtype=torch.int32, device="cuda")

    def seconds(call: Callable[[], object]) -> float:
        return float(triton.testing.do_bench(call, warmup=50, rep=300, return_mode="median")) / 1e3

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    def row(kernel: str, call: Callable[[], object], cost: tuple[int, int]) -> dict[str, Any]:
        (num_bytes, flops), time = cost, seconds(call)
        share = max(num_bytes / bytes_per_s, flops / flops_per_s) / time  # roofline: memory or arithmetic
        rates = {"gb_per_s": num_bytes / time / 1e9, "tflop_per_s": flops / time / 1e12}
        return common | {"kernel": kernel, "us": 1e6 * time} | rates | {"share_of_ceiling": share}

    bytes_per_s = 2 * 2**30 / seconds(randn(2**29).clone)
    flops_per_s = 2 * 8192**3 / seconds(partial(torch.matmul, randn(8192, 8192), randn(8192, 8192)))
    yield common | {"kernel": "ceiling: copy of 1 GiB", "gb_per_s": bytes_per_s / 1e9}
    yield common | {"kernel": "ceiling: matrix product of 8192", "tflop_per_s": flops_per_s / 1e12}
    block_size, heads, kv_heads, dim = 16, 32, 8, 128
    for label, query_lens, seq_lens in (
        ("decode 64 x 4096", [1] * 64, [4096] * 64),
        ("decode 1 x 4096", [1], [4096]),
        ("prefill 8192", [8192], [8192]),
        ("512 x 4 + 60 decodes at 2048", [512] * 4 + [1] * 60, [2048] * 64),
    ):
        reqs, tokens, longest = len(seq_lens), sum(query_lens), max(seq_lens)
        k_cache, v_cache = randn(2, reqs * longest // block_size, block_size, kv_heads, dim)
        table = torch.randperm(len(k_cache), device="cuda").int().view(reqs, -1)
        starts, lens = int32([0, *itertools.accumulate(query_lens)]), int32(seq_lens)
        positions = torch.cat([torch.arange(s - q, s, device="cuda") for q, s in zip(query_lens, seq_lens)])
        slots, q = torch.empty_like(positions), randn(tokens, heads, dim)
        k, v = randn(2, tokens, kv_heads, dim)
        call = partial(slot.slot_mapping, positions, starts, table, block_size, slots)
        yield row(f"slot_mapping, {label}", call, slot.slot_mapping_cost(tokens, tokens))
        call = partial(store.store_kv, k, v, k_cache, v_cache, slots)
        yield row(f"store_kv, {label}", call, store.store_kv_cost(tokens, kv_heads, dim, 2))
        paged = partial(attention.paged_attention, q, k_cache, v_cache, table, starts, lens, dim**-0.5)
        cost = attention.paged_attention_cost(query_lens, seq_lens, heads, kv_heads, dim, 2)
        yield row(f"attention, {label}", partial(paged, max_query_len=max(query_lens)), cost)
        if len(set(query_lens)) == 1:  # torch's attention wants K and V dense and all requests alike
            query, (key, value) = q.view(reqs, -1, heads, dim).transpose(1, 2), randn(2, reqs, kv_heads, longest, dim)
            sdpa = partial(F.scaled_dot_product_attention, query, key, value, is_causal=tokens > reqs, enable_gqa=True)
            yield row(f"torch SDPA, {label}", sdpa, cost)
