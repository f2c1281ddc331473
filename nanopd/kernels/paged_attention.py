"""Attention over a paged KV cache: prefill chunks and single decode tokens in one launch, and no phase told apart (S1).

Query i of request r stands at position seq_lens[r] - query_len[r] + i and sees every key at or before it (the last
`sliding_window` of them, if set). Keys come through the block table, so a tile of keys may lie in many blocks; the tile size
is free of the block size. Softmax is online and in float32. What no query may see is never loaded, so a NaN in an unused
slot, or garbage behind the used part of a table, cannot reach a result. Two kernels: attention, and the merge of partial
outputs by log-sum-exp, for contexts cut in splits (and for cascade attention). Packing grouped heads into the rows of a
query tile, and parallel splits for long decodes, follow arXiv 2511.11581 and arXiv 2311.01282 (Flash-Decoding); the online
softmax is FlashAttention's. Nothing here reads a tensor's value on the host, so a CUDA graph can hold it all.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# In the interpreter tl.dot multiplies bfloat16 operands as the integers they are stored in: there we widen them first.
INTERPRETED = bool(triton.knobs.runtime.interpret)
DOT_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True)
class Tiles:
    """How a launch is cut up. A program holds `rows` (query token x head) against one tile of `keys` after the other."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int  # depth of the software pipeline; going through the table to K and V takes two for each tile ahead
    num_splits: int  # programs that share one context


@functools.cache
def chip_of(device: torch.device) -> tuple[int, int]:
    """(processors, bytes of shared memory a program may have). In the interpreter: one, and room for large tiles."""
    if device.type != "cuda":
        return 1, 227 * 1024
    properties: Any = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin


def num_query_tiles(num_tokens: int, num_reqs: int, tokens: int, max_query_len: int) -> int:
    """Query tiles to launch, `tokens` in each: enough however the tokens are spread over the requests."""
    return num_reqs if max_query_len == 1 else num_tokens // tokens + num_reqs


def choose_tiles(
    num_tokens: int, num_reqs: int, num_kv_heads: int, group: int, itemsize: int, max_query_len: int, max_seq_len: int,
    num_sms: int, shared_bytes: int,
) -> Tiles:  # fmt: skip
    """Tile sizes by rule, not by trial runs: same input, same launch, so a captured graph stays valid.

    Few rows (decode) wait for memory: the smallest tile that tensor cores take (16 rows), and so few registers and so little
    shared memory that five programs fit on a Hopper processor, each with two tiles of K and V on the way. Many rows
    (prefill) wait for arithmetic: 128 of them, so that each K/V tile is used 128 times, and as many keys as registers and
    shared memory allow. Float32 is multiplied without tensor cores: small tiles, or registers spill. If four programs for
    every processor are not to be had, cut the contexts, but into nothing shorter than 256 keys.
    """
    rows = min(128, max(16, triton.next_power_of_2(max_query_len * group)))
    if itemsize == 4:
        rows, keys, warps, stages = min(rows, 32), 16, 8, 2
    elif rows >= 64 and shared_bytes >= 200 * 1024:
        keys, warps, stages = rows, rows // 16, 3
    else:
        keys, warps, stages = 32, max(4, rows // 16), 5 if shared_bytes >= 100 * 1024 else 3
    programs = num_kv_heads * num_query_tiles(num_tokens, num_reqs, rows // group, max_query_len)
    splits = min(4 * num_sms // max(programs, 1), max_seq_len // 256, 32)
    return Tiles(rows, keys, warps, stages, triton.next_power_of_2(max(splits, 1)))


# ----- attention ------------------------------------------------------------------------------------------------------
#
# One program = one query tile x one KV head x one split of the context. The rows of the tile are the heads of the group for
# one token after the other, so that every K/V tile, loaded once, serves the whole group (here a group of 4, 16 rows):
#
#                 keys of the request, through its block table: one tile between two bars, # seen, blank not
#      token 0 h0 [########|########|########|########|###     ]
#              h1 [########|########|########|########|###     ]        interior tiles: every row sees every key,
#              h2 [########|########|########|########|###     ]          no mask at all
#              h3 [########|########|########|########|###     ]        edge tile: causal mask, end of the context
#      token 1 h0 [########|########|########|########|####    ]          (with a window all tiles are edge tiles)
#              ..
#      token 3 h3 [########|########|########|########|######  ]
#                  `-------- split 0 --------'`--- split 1 ---'
#
#   loads   query      [rows, D]              once
#           table      [keys] int32           per tile: the block of each key
#           K, V       [keys, D] each         per tile: D contiguous elements a row, a row wherever its block is
#   stores  out        [rows, D]              once; with splits: float32, divided by its own sum, and the
#           lse        [rows] float32         log of that sum, by which the merge weighs it
#
# Per tile: 4 * rows * keys * D FLOPs (a multiply-add is 2) on 2 * keys * D elements, which in bf16 is `rows` FLOPs a byte. A
# decode with a group of 4 uses 4 rows of 16: 4 FLOPs a byte, so it waits for memory. A prefill with 128 rows waits for the
# tensor cores, and for the exponentials between the two products.
@triton.jit(do_not_specialize=["num_reqs"])  # type: ignore[untyped-decorator]
def _attention_kernel(  # type: ignore[no-untyped-def]
    query, k_cache, v_cache, block_table, query_start_loc, seq_lens, out, lse, scale_log2, num_reqs, q_token, q_head,
    stride_block, stride_slot, stride_head, stride_table, o_token, o_head, o_split, l_token, l_head, l_split,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    ONE_TOKEN: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = ROWS // GROUP  # in one query tile; a group of 3 leaves the last row of 16 idle
    BLOCK_D: tl.constexpr = triton.next_power_of_2(D)
    # The longest contexts stand at the end of a chunk: start them first, so that short ones fill up the last wave.
    tile, head, split = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)

    # Which request is tile number `tile` of? Request r gets the tiles from query_start_loc[r] // TOKENS + r on: one more
    # than it can need, so that the start is a formula and the host need not count. The last r that starts at or before us:
    req, beyond = (tile, tile) if ONE_TOKEN else (0, num_reqs)
    while beyond - req > 1:
        middle = (req + beyond) // 2
        reached = tl.load(query_start_loc + middle) // TOKENS + middle <= tile
        req, beyond = tl.where(reached, middle, req), tl.where(reached, beyond, middle)
    start = tl.load(query_start_loc + req)
    query_len = tl.load(query_start_loc + req + 1) - start
    first_token = 0 if ONE_TOKEN else (tile - start // TOKENS - req) * TOKENS
    if first_token >= query_len:
        return
    seq_len = tl.load(seq_lens + req)
    context = seq_len - query_len  # tokens before this chunk = position of the chunk's first token

    row, dim = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)[None, :]
    token = first_token + row // GROUP  # [ROWS], within the request
    position = (context + token)[:, None]
    q_row = (start + token).to(tl.int64)  # [ROWS], within the batch
    q_head_of_row = head * GROUP + row % GROUP
    real = (token < query_len) & (row < TOKENS * GROUP)
    exists = real[:, None] & (dim < D)
    q = tl.load(query + (q_row * q_token + q_head_of_row * q_head)[:, None] + dim, mask=exists, other=0.0).to(DOT)

    # The keys of this tile are [low, high), of this split [low, stop); before `inside` every row sees every key.
    low = tl.maximum(context + first_token - WINDOW + 1, 0) if WINDOW > 0 else 0
    high = context + tl.minimum(first_token + TOKENS, query_len) if CAUSAL else seq_len
    step = KEYS * tl.num_programs(2)  # one tile for each split
    per_split = (tl.maximum(high - low, 0) + step - 1) // step * KEYS
    low += split * per_split
    stop = tl.minimum(low + per_split, high)
    inside = tl.minimum(context + first_token + 1, stop) if CAUSAL else stop
    inside = low if WINDOW > 0 else low + tl.maximum(inside - low, 0) // KEYS * KEYS

    acc = tl.full([ROWS, BLOCK_D], 0.0, tl.float32)
    row_sum = tl.full([ROWS], 0.0, tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)  # in units of log2: exp2 is the instruction that GPUs have
    k_base, v_base = k_cache + head * stride_head + dim, v_cache + head * stride_head + dim
    for edge in tl.static_range(2):  # unrolled: a loop without masks, then the same with
        for first in range(inside if edge else low, stop if edge else inside, KEYS):
            j = first + tl.arange(0, KEYS)
            named = j < stop if edge else tl.full([KEYS], True, tl.int1)
            block = tl.load(block_table + req * stride_table + j // BLOCK_SIZE, mask=named, other=0)
            where = (block.to(tl.int64) * stride_block + j % BLOCK_SIZE * stride_slot)[:, None]
            exists_kv = named[:, None] & (dim < D)
            k = tl.load(k_base + where, mask=exists_kv, other=0.0).to(DOT)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")  # [ROWS, KEYS] float32
            if edge:
                seen = named[None, :]
                if CAUSAL:
                    seen = seen & (j[None, :] <= position)
                if WINDOW > 0:
                    seen = seen & (j[None, :] > position - WINDOW)
                scores = tl.where(seen, scores, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
            # A row that has seen no key yet: -inf - -inf would be NaN, so subtract 0 and get weights of 0.
            pivot = tl.where(new_max == float("-inf"), 0.0, new_max) if edge else new_max
            weight = tl.exp2(scores * scale_log2 - pivot[:, None])
            shrink = tl.exp2(row_max - pivot)  # what was summed before, in terms of the new maximum
            row_sum = row_sum * shrink + tl.sum(weight, 1)
            v = tl.load(v_base + where, mask=exists_kv, other=0.0).to(DOT)
            acc = tl.dot(weight.to(DOT), v, acc * shrink[:, None], input_precision="ieee")
            row_max = new_max

    total = tl.where(row_sum > 0, row_sum, 1.0)  # a row that saw nothing: 0 / 1, and log(0) below
    target = out + (q_row * o_token + q_head_of_row * o_head)[:, None] + split * o_split + dim
    tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=exists)
    if lse is not None:
        log_sum = tl.where(row_sum > 0, (row_max + tl.log2(total)) * 0.6931471805599453, float("-inf"))
        tl.store(lse + q_row * l_token + q_head_of_row * l_head + split * l_split, log_sum, mask=real)


# ----- merge ----------------------------------------------------------------------------------------------------------
#
# One program = one token of one head. Partial output s is divided by its own sum, of which lse[s] is the logarithm, so
#
#     out = sum_s exp(lse[s] - max) * partial[s]  /  sum_s exp(lse[s] - max)
#
#   loads   lse[t, h, :] [S], partial[t, h, :, :] [S, D]     stores  out[t, h, :] [D], and the lse of the whole
#
# It does not matter how the keys were dealt out to the parts: equal splits of a decode, or a common prefix and the rest.
@triton.jit  # type: ignore[untyped-decorator]
def _merge_kernel(  # type: ignore[no-untyped-def]
    partial, partial_lse, out, lse, num_splits, o_token, o_head, l_token, l_head, SPLITS: tl.constexpr, D: tl.constexpr
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split, dim = tl.arange(0, SPLITS), tl.arange(0, triton.next_power_of_2(D))
    part = (token * tl.num_programs(1) + head) * num_splits + split
    part_lse = tl.load(partial_lse + part, mask=split < num_splits, other=float("-inf"))
    top = tl.max(part_lse, 0)
    weight = tl.exp(part_lse - tl.where(top == float("-inf"), 0.0, top))
    total = tl.maximum(tl.sum(weight, 0), 1.0)  # the largest part weighs 1; if no part saw a key: 0 / 1, -inf + log(1)
    used = (weight > 0)[:, None] & (dim < D)[None, :]  # a part that saw no key holds nothing
    values = tl.load(partial + part[:, None] * D + dim[None, :], mask=used, other=0.0)
    merged = tl.sum(values * weight[:, None], 0) / total
    tl.store(out + token * o_token + head * o_head + dim, merged.to(out.dtype.element_ty), mask=dim < D)
    if lse is not None:
        tl.store(lse + token * l_token + head * l_head, top + tl.log(total))


def merge_partials(partial: Tensor, partial_lse: Tensor, out: Tensor, lse: Tensor | None = None) -> Tensor:
    """Join S outputs over disjoint sets of keys into the output over all of them. Returns `out` [T, Hq, D].

    partial: float32 [T, Hq, S, D], partial_lse: float32 [T, Hq, S], -inf where a part saw no key; both contiguous.
    lse: float32 [T, Hq], written if given.
    """
    num_tokens, num_heads, splits, head_dim = partial.shape
    assert partial.is_contiguous() and partial_lse.is_contiguous() and out.stride(2) == 1
    _merge_kernel[(num_tokens, num_heads)](
        partial, partial_lse, out, lse, splits, *out.stride()[:2], *((0, 0) if lse is None else lse.stride()),
        SPLITS=triton.next_power_of_2(splits), D=head_dim,
    )  # fmt: skip
    return out


def paged_attention(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor,
    scale: float, *, max_query_len: int, max_seq_len: int | None = None, sliding_window: int | None = None,
    causal: bool = True, out: Tensor | None = None, lse: Tensor | None = None, tiles: Tiles | None = None,
) -> Tensor:  # fmt: skip
    """Attention of a mixed batch of R requests with T tokens in all. Returns `out`.

    query, out        [T, Hq, D], D contiguous
    k_cache, v_cache  [num_blocks, block_size, Hkv, D], the same strides: any, but D contiguous
    block_table       int32 [R, max_blocks]; entries beyond the used ones may be anything
    query_start_loc   int32 [R + 1]: request r has the tokens [r] to [r + 1]
    seq_lens          int32 [R], with the tokens of this step
    scale             positive
    max_query_len     at least the longest; 1 promises that no request has more than one token
    max_seq_len       at least the longest, if the host knows it; else what a row of the table can hold
    causal            False: every query sees all of seq_lens (the common prefix, in cascade attention)
    lse               float32 [T, Hq]: if given, the logarithm of the softmax's sum is written here
    tiles             others than choose_tiles would take

    A request without tokens costs nothing; one with tokens but seq_len 0 gets zeros. Rows of `out` (and `lse`) that belong
    to no request, behind query_start_loc[R], are left undefined.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_reqs, num_kv_heads, block_size = seq_lens.shape[0], k_cache.shape[2], k_cache.shape[1]
    group = num_heads // num_kv_heads
    out = torch.empty_like(query) if out is None else out
    assert k_cache.stride() == v_cache.stride() and query.stride(2) == k_cache.stride(3) == out.stride(2) == 1
    assert group * num_kv_heads == num_heads and (sliding_window is None or (causal and sliding_window > 0))
    tiles = tiles or choose_tiles(  # the interpreter has no registers to run out of: large tiles, fewer steps
        num_tokens, num_reqs, num_kv_heads, group, 2 if INTERPRETED else query.itemsize, max_query_len,
        max_seq_len or block_table.shape[1] * block_size, *chip_of(query.device),
    )  # fmt: skip
    # With splits the kernel writes parts [T, Hq, S, D] and [T, Hq, S]; without, straight to its caller's tensors.
    splits, part, part_lse = tiles.num_splits, out[:, :, None], None if lse is None else lse[:, :, None]
    if splits > 1:
        part = query.new_empty(num_tokens, num_heads, splits, head_dim, dtype=torch.float32)
        part_lse = query.new_empty(num_tokens, num_heads, splits, dtype=torch.float32)
    grid = (num_query_tiles(num_tokens, num_reqs, tiles.rows // group, max_query_len), num_kv_heads, splits)
    _attention_kernel[grid](
        query, k_cache, v_cache, block_table, query_start_loc, seq_lens, part, part_lse, scale * math.log2(math.e), num_reqs,
        *query.stride()[:2], *k_cache.stride()[:3], block_table.stride(0), *part.stride()[:3],
        *((0, 0, 0) if part_lse is None else part_lse.stride()), GROUP=group, D=head_dim, BLOCK_SIZE=block_size,
        ROWS=tiles.rows, KEYS=tiles.keys, ONE_TOKEN=max_query_len == 1, CAUSAL=causal, WINDOW=sliding_window or 0,
        DOT=tl.float32 if INTERPRETED else DOT_TYPES[query.dtype], num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out if part_lse is None or splits == 1 else merge_partials(part, part_lse, out, lse)
