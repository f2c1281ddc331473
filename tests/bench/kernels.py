"""The Triton kernels: `nanopd bench kernels`. On a GPU their times, against what the chip can do and against torch's own
attention; without one, what the compilers make of them (aot.py).

The `*_cost` functions count what a call must move and multiply at least, whatever the kernel really does.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton.testing

from nanopd.config import UserError
from nanopd.kernels import kv_store, paged_attention, slot_mapping

from . import aot


def measure(targets: list[str]) -> Iterator[dict[str, Any]]:
    """Times on a GPU; without one, what the kernels compile to for `targets` (none: all)."""
    if unknown := sorted(set(targets) - set(aot.TARGETS)):
        raise UserError(f"Unknown target {', '.join(unknown)}; known are {', '.join(aot.TARGETS)}.")
    if paged_attention.INTERPRETED:
        raise UserError("TRITON_INTERPRET is set, so nothing can be compiled; unset it for this command.")
    if torch.cuda.is_available():
        yield from _times()
    else:
        for target in targets or list(aot.TARGETS):
            yield from aot.report(target)


def slot_mapping_cost(num_tokens: int, out_len: int) -> tuple[int, int]:
    """(bytes, FLOPs) of one call: a position and a table entry in, a slot out. It computes nothing but addresses."""
    return num_tokens * (8 + 4) + out_len * 8, 0


def store_kv_cost(num_tokens: int, num_kv_heads: int, head_dim: int, itemsize: int) -> tuple[int, int]:
    """(bytes, FLOPs) of one call: K and V, each read once and written once, and a slot per token. It computes nothing."""
    return num_tokens * (2 * 2 * num_kv_heads * head_dim * itemsize + 8), 0


def paged_attention_cost(
    query_lens: list[int], seq_lens: list[int], heads: int, kv_heads: int, head_dim: int, itemsize: int, window: int = 0
) -> tuple[int, int]:
    """(bytes, FLOPs) of one call: what must move (Q and out once, every visible K and V once) and be multiplied.

    A multiply-add counts as 2, and there are two for each (head, query, visible key, dimension): Q K^T and P V.
    """
    window = window or max(seq_lens)
    keys = sum(min(s, q + window - 1) for q, s in zip(query_lens, seq_lens))
    pairs = sum(min(s - i, window) for q, s in zip(query_lens, seq_lens) for i in range(q))
    return 2 * (keys * kv_heads + sum(query_lens) * heads) * head_dim * itemsize, 4 * pairs * heads * head_dim


def _times() -> Iterator[dict[str, Any]]:
    """Medians on the current device, in the shapes of Llama-3-8B: 32 / 8 heads of 128, bfloat16, blocks of 16 tokens."""
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
        call = partial(slot_mapping.slot_mapping, positions, starts, table, block_size, slots)
        yield row(f"slot_mapping, {label}", call, slot_mapping_cost(tokens, tokens))
        call = partial(kv_store.store_kv, k, v, k_cache, v_cache, slots)
        yield row(f"store_kv, {label}", call, store_kv_cost(tokens, kv_heads, dim, 2))
        paged = partial(paged_attention.paged_attention, q, k_cache, v_cache, table, starts, lens, dim**-0.5)
        cost = paged_attention_cost(query_lens, seq_lens, heads, kv_heads, dim, 2)
        yield row(f"attention, {label}", partial(paged, max_query_len=max(query_lens)), cost)
        if len(set(query_lens)) == 1:  # torch's attention wants K and V dense and all requests alike
            query, (key, value) = q.view(reqs, -1, heads, dim).transpose(1, 2), randn(2, reqs, kv_heads, longest, dim)
            sdpa = partial(F.scaled_dot_product_attention, query, key, value, is_causal=tokens > reqs, enable_gqa=True)
            yield row(f"torch SDPA, {label}", sdpa, cost)
