"""Attention of decodes over the paged KV cache on a CPU: the loop of paged_attention.py, compiled by Numba.

torch has no attention that follows a block table, so the plain backend copies K and V out of their blocks, and at long
contexts the copy costs more than anything else in a step. Here a thread reads the blocks where they lie, each byte once.
Softmax is online and in float32, as on the GPU; what a query may not see is never read.

    for each row = one new token of a request
        for each block that it sees             in the default model 12 KB of K and 12 KB of V, read in the order of memory
            scores = q . K                      [Hq, block_size], slot by slot; a group of query heads shares a KV head
            total, acc *= 2^(old maximum - new maximum)
            acc += 2^(scores - maximum) . V     [Hq, D], slot by slot
        output = acc / total
"""

# mypy: disable-error-code="no-untyped-call"

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from torch import Tensor

from nanopd.kernels.cpu import as_array, compiled, exp2, widen


@cache
def compile_kernel(head_dim: int) -> Callable[..., None]:
    """The kernel for one head_dim, which is a constant in it, so that its loops unroll."""
    D = head_dim

    def kernel(  # type: ignore[no-untyped-def]
        rows, q, k, v, block_stride, block_table, seq_lens, block_size, window, output, lse
    ):
        _, num_kv_heads, group = lse.shape
        num_heads = num_kv_heads * group
        scores = np.empty((num_heads, block_size), np.float32)
        maximum, total = np.empty(num_heads, np.float32), np.empty(num_heads, np.float32)
        acc = np.empty((num_heads, D), np.float32)
        for row in range(rows[0], rows[1]):
            acc[:], maximum[:], total[:] = 0, -1e30, 0
            end = seq_lens[row]
            start = max(0, end - window)
            for i in range(start // block_size, (end + block_size - 1) // block_size):
                block = block_table[row, i] * block_stride
                slots = range(max(start - i * block_size, 0), min(end - i * block_size, block_size))
                for slot in slots:
                    for kv_head in range(num_kv_heads):
                        at = block + (slot * num_kv_heads + kv_head) * D
                        key = k[at : at + D]
                        for head in range(kv_head * group, (kv_head + 1) * group):
                            query, dot = q[row, head], np.float32(0)
                            for d in range(D):
                                dot += query[d] * widen(key[d])
                            scores[head, slot] = dot
                for head in range(num_heads):
                    weights, out = scores[head, slots.start : slots.stop], acc[head]
                    pivot, summed = maximum[head], total[head]
                    for t in range(len(weights)):
                        pivot = max(pivot, weights[t])
                    shrink = exp2(maximum[head] - pivot)
                    summed *= shrink
                    for t in range(len(weights)):
                        weights[t] = exp2(weights[t] - pivot)
                        summed += weights[t]
                    for d in range(D):
                        out[d] *= shrink
                    maximum[head], total[head] = pivot, summed
                for slot in slots:
                    for kv_head in range(num_kv_heads):
                        at = block + (slot * num_kv_heads + kv_head) * D
                        value = v[at : at + D]
                        for head in range(kv_head * group, (kv_head + 1) * group):
                            out, weight = acc[head], scores[head, slot]
                            for d in range(D):
                                out[d] += weight * widen(value[d])
            for head in range(num_heads):
                for d in range(D):
                    output[row, head, d] = acc[head, d] / total[head]
                lse[row, head // group, head % group] = (maximum[head] + math.log2(total[head])) * math.log(2)

    return compiled(kernel, D)


def paged_decode(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, window: int | None,
    threads: ThreadPoolExecutor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Lets each of N rows attend to the first `seq_lens` tokens of its table, or to the last `window` of these.

    query [N, Hq, D] float32 or bfloat16; caches [num_blocks, block_size, Hkv, D] of the same type, with no gaps in a block;
    block_table [N, longest] int32; seq_lens [N] int64, at least 1. torch.get_num_threads() threads get equal parts.
    Returns the output, [N, Hq, D] float32, and the log of each softmax's sum, [N, Hq] float32.
    """
    (num_rows, num_heads, head_dim), (num_blocks, block_size, num_kv_heads, _) = query.shape, k_cache.shape
    block, stride = k_cache[0].numel(), k_cache.stride(0)
    assert k_cache.stride() == v_cache.stride() == (stride, num_kv_heads * head_dim, head_dim, 1)
    flat = [x.as_strided([(num_blocks - 1) * stride + block], [1]) for x in (k_cache, v_cache)]
    k, v = map(as_array, flat)
    scaled = query.float() * (head_dim**-0.5 / math.log(2))  # 2^x is what processors have, so log2(e) is in the scale
    output = torch.empty(query.shape)
    lse = torch.empty(num_rows, num_kv_heads, num_heads // num_kv_heads)
    q, table, lengths, out, sums = (x.numpy() for x in (scaled, block_table, seq_lens, output, lse))
    kernel, parts = compile_kernel(head_dim), min(num_rows, torch.get_num_threads())

    def work(i: int) -> None:
        rows = num_rows * i // parts, num_rows * (i + 1) // parts
        kernel(rows, q, k, v, stride, table, lengths, block_size, window or 1 << 31, out, sums)

    others = threads.map(work, range(1, parts))  # they begin at once
    work(0)
    list(others)
    return output, lse.view(num_rows, num_heads)
