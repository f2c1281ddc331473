"""Attention over the paged KV cache on a CPU: the loop of paged_attention.py, compiled by Numba.

torch has no attention that follows a block table, so the plain backend copies K and V out of their blocks. Here a thread
reads the blocks where they lie. Softmax is online and in float32, as on the GPU; what a query may not see is never read.

    for each tile = up to 8 new tokens of one request, and all their heads
        for each block that they see
            for each KV head, with the query heads that share it         R of them: tokens x group
                scores = q . K                      [R, block_size]
                scores, old maximum -= new maximum; 2^ of them all
                total, acc = total, acc * 2^(old maximum - new maximum) + 2^scores . (1, V)
        output = acc / total

A decode is a tile of one token. In a tile of a prompt each K and V that is read serves several tokens.
"""

# mypy: disable-error-code="no-untyped-call"

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from nanopd.kernels.cpu import exp2, narrow, over, widen

TILE_TOKENS = 8
"""Most tokens of a tile: enough that a block is read from memory once, few enough that all of it stays in fast caches."""


@cache
def compile_kernel(head_dim: int, block_size: int) -> Callable[..., None]:
    """The kernel for one head_dim and block_size, which are constants in it, so that its inner loops unroll.

    K and V come as rows of one head's numbers in one slot: in a block, slot t of KV head h is row t * num_kv_heads + h.
    """
    D, B = head_dim, block_size

    def attend(first, last, tiles, q, k, v, block_rows, block_table, scale, num_kv_heads, window, output, lse):  # type: ignore[no-untyped-def]
        group = q.shape[1] // num_kv_heads
        most = TILE_TOKENS * group
        queries, acc = np.empty((2, num_kv_heads, most, D), np.float32)
        maximum, total = np.empty((2, num_kv_heads, most), np.float32)
        scores = np.empty((most, B + 1), np.float32)  # of a row and each slot; the last column is the old maximum
        flat_scores = scores.reshape(most * (B + 1))
        last_k, last_v = np.zeros((B * num_kv_heads, D), k.dtype), np.zeros((B * num_kv_heads, D), v.dtype)
        for n in range(first, last):
            request, first_token, num_tokens, seen, more = tiles[
                n
            ]  # its first token sees `seen`, each other `more` more
            rows, end = num_tokens * group, seen + (num_tokens - 1) * more
            acc[:], maximum[:], total[:] = 0, -1e30, 0
            for h in range(num_kv_heads):
                for r in range(rows):
                    for d in range(D):
                        queries[h, r, d] = widen(q[first_token + r // group, h * group + r % group, d]) * scale
            for i in range(max(0, seen - window) // B, (end + B - 1) // B):
                at, keys, values = block_table[request, i] * block_rows, k, v
                if end < (i + 1) * B:  # behind the last token there may be anything
                    filled = (end - i * B) * num_kv_heads
                    for r in range(filled):
                        last_k[r], last_v[r] = k[at + r], v[at + r]
                    last_k[filled:], last_v[filled:] = 0, 0
                    at, keys, values = 0, last_k, last_v
                for h in range(num_kv_heads):
                    qs, out = queries[h], acc[h]
                    for r in range(rows):
                        for t in range(B):
                            dot = np.float32(0)
                            for d in range(D):
                                dot += qs[r, d] * widen(keys[at + t * num_kv_heads + h, d])
                            scores[r, t] = dot
                    if seen < (i + 1) * B or end - window > i * B:
                        for r in range(rows):
                            sees = seen + r // group * more - i * B
                            for t in range(B):
                                if t >= sees or t < sees - window:
                                    scores[r, t] = -1e30
                    for r in range(rows):
                        scores[r, B] = pivot = maximum[h, r]
                        for t in range(B):
                            pivot = max(pivot, scores[r, t])
                        maximum[h, r] = pivot
                        for t in range(B + 1):
                            scores[r, t] -= pivot
                    for j in range(rows * (B + 1)):
                        flat_scores[j] = exp2(flat_scores[j])
                    for r in range(rows):
                        weights, shrink = scores[r], scores[r, B]
                        summed = total[h, r] * shrink
                        for t in range(B):
                            summed += weights[t]
                        total[h, r] = summed
                        for d in range(D):
                            x = out[r, d] * shrink
                            for t in range(B):
                                x += weights[t] * widen(values[at + t * num_kv_heads + h, d])
                            out[r, d] = x
            for h in range(num_kv_heads):
                for r in range(rows):
                    token, head = first_token + r // group, h * group + r % group
                    for d in range(D):
                        output[token, head, d] = narrow(acc[h, r, d] / total[h, r], output[token, head, d])
                    lse[token, head] = (maximum[h, r] + math.log2(total[h, r])) * math.log(2)

    return over(attend, D, B, parallel_from=2)


def plan_tiles(query_lens: list[int], seq_lens: list[int], causal: bool) -> np.ndarray:
    """The new tokens of each request in pieces of up to `TILE_TOKENS`: int64 [N, 5] of request, first token, number of
    tokens, how many tokens the first sees, and by how much more each other: 1, or 0 where all see everything.

    In an order in which torch.get_num_threads() parts of it, one behind the other, take about as long as each other.
    """
    tiles, start = [], 0
    for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens)):
        for i in range(0, query_len, TILE_TOKENS):
            n, seen = min(TILE_TOKENS, query_len - i), seq_len - query_len + i + 1 if causal else seq_len
            tiles.append((request, start + i, n, seen, int(causal)))
        start += query_len
    tiles.sort(key=lambda tile: tile[2] * tile[3], reverse=True)
    threads, dealt = torch.get_num_threads(), []
    for i in range(threads):  # to and fro, for two threads: 0 1 1 0 0 1 1 0 ...
        dealt += tiles[i :: 2 * threads] + tiles[2 * threads - 1 - i :: 2 * threads]
    return np.array(dealt, dtype=np.int64)


def paged_attention(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, tiles: np.ndarray, window: int | None,
    output: Tensor, lse: Tensor | None = None,
) -> None:  # fmt: skip
    """Lets each new token attend to the tokens that it sees (see `plan_tiles`), or to the last `window` of these.

    query [T, Hq, D] float32 or bfloat16; caches [num_blocks, block_size, Hkv, D] of the same type, with no gaps in a block;
    block_table [R, longest] int32. Fills output, like query, and if it is wanted the log of each softmax's sum, lse [T, Hq]
    float32.
    On torch.get_num_threads() threads.
    """
    num_blocks, block_size, num_kv_heads, head_dim = k_cache.shape
    block, stride = k_cache[0].numel(), k_cache.stride(0)
    assert k_cache.stride() == v_cache.stride() == (stride, num_kv_heads * head_dim, head_dim, 1)
    flat = [x.as_strided([(num_blocks - 1) * stride + block], [1]).view(-1, head_dim) for x in (k_cache, v_cache)]
    scale = np.float32(head_dim**-0.5 / math.log(2))  # 2^x is what processors have, so log2(e) is in the scale
    caches = *flat, stride // head_dim, block_table, scale, num_kv_heads, window or 1 << 31
    sums = torch.empty(query.shape[:2]) if lse is None else lse
    compile_kernel(head_dim, block_size)(len(tiles), tiles, query.contiguous(), *caches, output, sums)
