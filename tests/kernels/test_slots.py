"""Slot mapping and KV store: rule K1, slot -1, the three layouts (T1, T2)."""

import pytest
import torch

from nanopd.kernels.kv_store import store_kv
from nanopd.kernels.paged_attention import paged_attention
from nanopd.kernels.slot_mapping import slot_mapping
from tests.bench.kernels import slot_mapping_cost, store_kv_cost

from .batches import DEVICE, GARBAGE, LAYOUTS, empty_cache, fresh_seed
from .reference import slot_mapping_reference, store_kv_reference


@pytest.mark.parametrize("function", [slot_mapping, slot_mapping_reference])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_slots_follow_k1_and_the_rest_is_padding(function, block_size):
    gen = torch.Generator().manual_seed(fresh_seed())
    # (query_len, seq_len): a first token, an exact block, one more, nothing, a chunk in the middle, one longer than a tile
    requests = [(1, 1), (block_size, block_size), (1, block_size + 1), (0, 0), (7, 3 * block_size - 2), (1500, 1501)]
    width = -(-1501 // block_size)
    table = GARBAGE[torch.randint(4, (len(requests), width + 1), generator=gen)].int()
    positions, want, starts = [], [], [0]
    for r, (query_len, seq_len) in enumerate(requests):
        used = -(-seq_len // block_size)
        table[r, :used] = torch.randint(1 << 27, (used,), generator=gen).int()  # slots beyond 2^31 must survive
        for position in range(seq_len - query_len, seq_len):
            positions.append(position)
            want.append(int(table[r, position // block_size]) * block_size + position % block_size)
        starts.append(len(positions))
    out = torch.full((len(positions) + 9,), -123, device=DEVICE)
    positions += [1 << 40] * 5  # a padded buffer holds anything
    function(
        torch.tensor(positions, device=DEVICE), torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        table.to(DEVICE)[:, :width], block_size, out,
    )  # fmt: skip
    assert out.tolist() == want + [-1] * 9


@pytest.mark.parametrize("function", [store_kv, store_kv_reference])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("heads", "dim", "block_size", "dtype"),
    [(1, 64, 16, torch.float32), (3, 64, 32, torch.bfloat16), (2, 80, 16, torch.float16), (8, 128, 64, torch.bfloat16)],
)
def test_store_writes_these_slots_and_nothing_else(function, layout, heads, dim, block_size, dtype):
    gen = torch.Generator().manual_seed(fresh_seed())
    tokens, num_blocks = 13, 4
    k_cache, v_cache = empty_cache(layout, num_blocks, block_size, heads, dim, dtype)
    fused = torch.randn(tokens, 3 * heads, dim, generator=gen).to(DEVICE, dtype)
    key, value = fused[:, heads : 2 * heads], fused[:, 2 * heads :]
    slots = torch.randperm(num_blocks * block_size - 1, generator=gen)[: tokens + 3]
    slots[[0, 5, 12]] = -1
    slots[3] = num_blocks * block_size - 1  # the last slot there is
    slots[tokens:] = -1
    whole = k_cache._base if k_cache._base is not None else k_cache
    function(key, value, k_cache, v_cache, slots.to(DEVICE))
    written = 0
    for t, slot in enumerate(slots[:tokens].tolist()):
        if slot >= 0:
            assert torch.equal(k_cache[slot // block_size, slot % block_size], key[t])
            assert torch.equal(v_cache[slot // block_size, slot % block_size], value[t])
            written += 2 * heads * dim
    assert whole.isnan().sum() == whole.numel() - written  # K, V and the other layers' memory: still poison


def test_an_empty_step_stores_nothing():
    k_cache, v_cache = empty_cache("kv_first", 1, 16, 1, 64, torch.float32)
    store_kv(
        *torch.zeros(2, 0, 1, 64, device=DEVICE), k_cache, v_cache, torch.zeros(4, dtype=torch.int64, device=DEVICE)
    )
    assert k_cache.isnan().all()


def test_costs():
    assert slot_mapping_cost(3, 4) == (3 * 12 + 4 * 8, 0)
    assert store_kv_cost(2, 8, 128, 2) == (2 * (2 * 2 * 2048 + 8), 0)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_a_cache_of_more_than_2_to_the_31_elements():
    """Offsets are 64-bit, in store and attention: over one key, attention gives back the value that was stored."""
    heads, dim, block_size = 8, 128, 16
    last = 2**31 // (heads * dim * block_size) + 2
    shape = last + 1, block_size, heads, dim
    k_cache, v_cache = (torch.full(shape, torch.nan, dtype=torch.bfloat16, device=DEVICE) for _ in "kv")
    key, value = torch.randn(2, 1, heads, dim, device=DEVICE).bfloat16()
    store_kv(key, value, k_cache, v_cache, torch.tensor([last * block_size], device=DEVICE))
    table, starts, lens = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([[last]], [0, 1], [1]))
    out = paged_attention(key, k_cache, v_cache, table, starts, lens, 0.1, max_query_len=1)
    assert torch.equal(out, value)
