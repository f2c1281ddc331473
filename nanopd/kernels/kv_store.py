"""Scatter the new keys and values of a step into the paged cache, by slot mapping (K1). Once per layer, before attention.

The cache is one allocation in one of three layouts (worker/kv_memory.py); what arrives here are the K and the V half of
one layer as views [num_blocks, block_size, Hkv, D]. Only strides differ between the layouts, so strides are all the kernel
reads. The head dimension must be contiguous. Slot -1 writes nothing. Knows nothing of requests: a token is a row and a slot.
"""

import triton
import triton.language as tl
from torch import Tensor


# One program = one token, all its heads, K and V.
#
#       key[t]   [Hkv, D] --load--> tile [heads, dims] --store--> k_cache[slot // bs, slot % bs]   [Hkv, D]
#     value[t]   [Hkv, D] --load--> tile [heads, dims] --store--> v_cache[slot // bs, slot % bs]   [Hkv, D]
#
# Llama-3-8B: 8 heads x 128 in bf16 are 2 KiB, 16 bytes for each of 128 threads: one wide load, one wide store. In all three
# layouts the heads of a token lie side by side, so both ends are runs of Hkv * D elements. A tile's sides are powers
# of two; what is beyond Hkv and D is masked. A block's offset is int64: a cache easily has more than 2^31 elements.
@triton.jit  # type: ignore[untyped-decorator]
def _store_kv_kernel(  # type: ignore[no-untyped-def]
    key, value, k_cache, v_cache, slots, k_token, k_head, v_token, v_head, stride_block, stride_slot, stride_head,
    BLOCK_SIZE: tl.constexpr, NUM_HEADS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    head = tl.arange(0, triton.next_power_of_2(NUM_HEADS))[:, None]
    dim = tl.arange(0, triton.next_power_of_2(D))[None, :]
    exists = (head < NUM_HEADS) & (dim < D)
    target = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_slot + head * stride_head + dim
    tl.store(k_cache + target, tl.load(key + token * k_token + head * k_head + dim, mask=exists), mask=exists)
    tl.store(v_cache + target, tl.load(value + token * v_token + head * v_head + dim, mask=exists), mask=exists)


def store_kv(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write token t to slot_mapping[t]. Tokens of one call have different slots, so programs never write the same place.

    key, value: [T, Hkv, D], D contiguous (a slice of a fused QKV projection will do). k_cache, v_cache: [num_blocks,
    block_size, Hkv, D], the same strides: any, but D contiguous. slot_mapping: int64 [>= T].
    """
    num_tokens, num_heads, head_dim = key.shape
    assert k_cache.stride() == v_cache.stride() and key.stride(2) == value.stride(2) == k_cache.stride(3) == 1
    if num_tokens:
        _store_kv_kernel[(num_tokens,)](
            key, value, k_cache, v_cache, slot_mapping, *key.stride()[:2], *value.stride()[:2], *k_cache.stride()[:3],
            BLOCK_SIZE=k_cache.shape[1], NUM_HEADS=num_heads, D=head_dim,
        )  # fmt: skip
