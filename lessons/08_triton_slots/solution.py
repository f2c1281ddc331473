"""The solution of exercise 08."""

import triton
import triton.language as tl


@triton.jit
def slot_mapping_kernel(
    positions, query_start_loc, block_table, out, stride_table, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr
):
    """One program = one request: writes the slot of each of its tokens."""
    req = tl.program_id(0)
    start = tl.load(query_start_loc + req)
    end = tl.load(query_start_loc + req + 1)
    for first in range(start, end, TILE):
        token = first + tl.arange(0, TILE)
        mine = token < end
        position = tl.load(positions + token, mask=mine, other=0)
        block = tl.load(block_table + req * stride_table + position // BLOCK_SIZE, mask=mine, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        tl.store(out + token, slot, mask=mine)


@triton.jit
def store_kv_kernel(
    key, value, k_cache, v_cache, slots, k_token, k_head, v_token, v_head, stride_block, stride_slot, stride_head,
    BLOCK_SIZE: tl.constexpr, NUM_HEADS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """One program = one token: copies its key and its value, NUM_HEADS x D each, to its slot. Slot -1: writes nothing."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        head = tl.arange(0, triton.next_power_of_2(NUM_HEADS))[:, None]
        dim = tl.arange(0, triton.next_power_of_2(D))[None, :]
        exists = (head < NUM_HEADS) & (dim < D)
        target = (slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_slot + head * stride_head + dim
        k = tl.load(key + token * k_token + head * k_head + dim, mask=exists)
        tl.store(k_cache + target, k, mask=exists)
        v = tl.load(value + token * v_token + head * v_head + dim, mask=exists)
        tl.store(v_cache + target, v, mask=exists)
