"""Exercise 08: the two kernels that decide where a token's key and value go.

Write the two bodies, as real Triton kernels: the engine will launch yours instead of its own, in Triton's interpreter.
`nanopd grade 08 exercise.py` runs it. All you need: tl.program_id, tl.arange, tl.load and tl.store (with mask=), range,
arithmetic. (`raise` is no Triton: it works in the interpreter only, and only here, to say that something is missing.)

Rules: K1 (slots, and -1), T1; see lessons/rules.md.
"""

import triton
import triton.language as tl


@triton.jit
def slot_mapping_kernel(
    positions, query_start_loc, block_table, out, stride_table, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr
):
    """One program = one request: writes the slot of each of its tokens.

    positions: int64 [T], where each token stands in its request. query_start_loc: int32 [R + 1]: request r has the tokens
    from [r] up to, not including, [r + 1]. block_table: int32; from one request's row to the next are `stride_table`
    elements; what stands behind a request's last block must not be followed, nor even loaded. out: int64 [>= T].

    Works on TILE tokens at a time; a request may have fewer or more. TILE is a power of two. A block number may be as large
    as an int32 can be; its slots are larger.
    """
    raise NotImplementedError("slot_mapping_kernel")


@triton.jit
def store_kv_kernel(
    key, value, k_cache, v_cache, slots, k_token, k_head, v_token, v_head, stride_block, stride_slot, stride_head,
    BLOCK_SIZE: tl.constexpr, NUM_HEADS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """One program = one token: copies its key and its value, NUM_HEADS x D each, to its slot. Slot -1: writes nothing.

    slots: int64 [T]. All others are addresses of the first element, and elements from one to the next: in key `k_token` from
    token to token and `k_head` from head to head, in value `v_token` and `v_head`; in both caches `stride_block` from block
    to block, `stride_slot` from row to row within a block, `stride_head` from head to head. The D elements of a head are
    neighbours everywhere.

    NUM_HEADS and D need not be powers of two (`triton.next_power_of_2` may be used in a kernel): nothing beyond them may be
    loaded or written.
    """
    raise NotImplementedError("store_kv_kernel")
