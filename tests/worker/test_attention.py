"""The CPU backend against attention written out in float64, on mixed batches, in all layouts."""

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba
import pytest
import torch
from numba.core.caching import IndexDataCacheFile

from nanopd.config import LAYOUTS, EngineConfig, UserError
from nanopd.kernels.cpu import compiled
from nanopd.kernels.cpu_paged_attention import paged_decode
from nanopd.worker import attention
from nanopd.worker.attention import AttentionMetadata, CPUAttention, choose_backend
from nanopd.worker.kv_memory import KVCache, bytes_per_block, plan_num_blocks
from tests.worker.models import tiny_config

BLOCK_SIZE, NUM_BLOCKS, HEADS, KV_HEADS, DIM = 4, 60, 6, 2, 8
BATCHES = {
    "decodes of all lengths": ([1] * 8, [1, 2, 4, 5, 8, 9, 31, 17]),
    "one chunk, no context": ([13], [13]),
    "chunks and decodes": ([3, 1, 7, 1, 1], [20, 9, 7, 9, 40]),
    "a chunk that ends a block": ([4], [12]),
}


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """q [n, Hq, D], the last n of k, v [L, Hkv, D]; in float64."""
    q, k, v = (
        q.double(),
        k.double().repeat_interleave(HEADS // KV_HEADS, 1),
        v.double().repeat_interleave(HEADS // KV_HEADS, 1),
    )
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(DIM)
    for i in range(len(q)):
        position = len(k) - len(q) + i
        for j in range(len(k)):
            if j > position or (window is not None and j <= position - window):
                scores[:, i, j] = -math.inf
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(
    ("compiled", "dtype"),
    [(compiled, dtype) for compiled in (False, True) for dtype in ("float32", "bfloat16")] + [(False, "float16")],
)
def test_against_dense_attention(
    compiled: bool, dtype: str, name: str, layout: str, window: int | None, monkeypatch: pytest.MonkeyPatch
):
    """In the narrower types, too: their inputs are exact in float64, so only the output may be rounded (to 2^-8, 2^-11)."""
    kind, error = getattr(torch, dtype), {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}[dtype]
    monkeypatch.setattr(attention, "LONG_CONTEXT", 1)
    torch.manual_seed(0)
    query_lens, seq_lens = BATCHES[name]
    cache = KVCache.allocate(tiny_config(KV_HEADS, DIM), NUM_BLOCKS, BLOCK_SIZE, layout, kind, "cpu")
    cache.memory.fill_(math.nan)  # whatever no request holds, and the tails of blocks, must not matter
    k_cache, v_cache = cache.layers[1]
    free, tables, keys, values = iter(torch.randperm(NUM_BLOCKS).tolist()), [], [], []
    longest = -(-max(seq_lens) // BLOCK_SIZE)
    for query_len, seq_len in zip(query_lens, seq_lens):
        table = [next(free) for _ in range(-(-seq_len // BLOCK_SIZE))]
        tables.append(table + [0] * (longest - len(table)))  # what stands behind a table means nothing
        keys.append(torch.randn(seq_len, KV_HEADS, DIM).to(kind))
        values.append(torch.randn(seq_len, KV_HEADS, DIM).to(kind))
        for position in range(seq_len - query_len):
            slot = (table[position // BLOCK_SIZE], position % BLOCK_SIZE)
            k_cache[slot], v_cache[slot] = keys[-1][position], values[-1][position]
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
    positions = torch.cat([torch.arange(s - q, s) for q, s in zip(query_lens, seq_lens)])
    block_table, slots = torch.tensor(tables, dtype=torch.int32), torch.empty(len(positions), dtype=torch.int64)
    backend, lens = CPUAttention(compiled), torch.tensor(seq_lens, dtype=torch.int32)
    backend.plan(AttentionMetadata(starts, lens, block_table, slots, query_lens, seq_lens), positions, BLOCK_SIZE)
    expected_slots = [
        table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
        for table, query_len, seq_len in zip(tables, query_lens, seq_lens)
        for p in range(seq_len - query_len, seq_len)
    ]
    assert slots.tolist() == expected_slots, "K1"
    query = torch.randn(sum(query_lens), HEADS, DIM).to(kind)
    new_k = torch.cat([k[len(k) - n :] for k, n in zip(keys, query_lens)])
    new_v = torch.cat([v[len(v) - n :] for v, n in zip(values, query_lens)])
    output = backend(query, new_k, new_v, k_cache, v_cache, window)
    assert output.dtype == kind
    for i, (start, n) in enumerate(zip(starts.tolist(), query_lens)):
        expected = dense(query[start : start + n], keys[i], values[i], window)
        torch.testing.assert_close(output[start : start + n].double(), expected, atol=error, rtol=max(error, 1e-4))
    assert torch.isnan(cache.layers[0][0]).all(), "another layer was touched"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_share_one_allocation(layout: str):
    model = tiny_config(KV_HEADS, DIM)
    cache = KVCache.allocate(model, NUM_BLOCKS, BLOCK_SIZE, layout, torch.bfloat16, "cpu")
    assert cache.memory.nbytes == NUM_BLOCKS * bytes_per_block(model, BLOCK_SIZE, torch.bfloat16)
    assert cache.memory.is_contiguous()
    assert not cache.memory.any()
    for layer, pair in enumerate(cache.layers):
        for kv, view in enumerate(pair):
            assert view.shape == (NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, DIM)
            view[7, 3] = 1 + layer * 2 + kv
    index = {"kv_first": (0, 0, 7), "blocks_first": (0, 7, 0), "cross_layer": (7, 0, 0)}[layout]
    assert cache.memory[index][3].unique().tolist() == [1.0]
    if layout == "cross_layer":  # a block of all layers is one run of memory
        assert cache.memory[7].is_contiguous()
        assert cache.memory[7].any(dim=-1).all(dim=-1).sum() == model.num_layers * 2


def test_the_compiled_loop_reads_bfloat16():
    """The same numbers as a float32 cache gives that holds what bfloat16 can hold."""
    torch.manual_seed(0)
    k, v = torch.randn(2, 6, BLOCK_SIZE, KV_HEADS, DIM).bfloat16()
    query, table = torch.randn(3, HEADS, DIM).bfloat16(), torch.tensor([[4, 1], [0, 5], [2, 3]], dtype=torch.int32)
    with ThreadPoolExecutor(1) as threads:
        rest = table, torch.tensor([1, 4, 7]), None, threads
        narrow, wide = paged_decode(query, k, v, *rest), paged_decode(query.float(), k.float(), v.float(), *rest)
    assert torch.equal(narrow[0], wide[0]) and torch.equal(narrow[1], wide[1])
    torch.testing.assert_close(wide[0][0], v[4, 0].float().repeat_interleave(HEADS // KV_HEADS, 0))  # it sees one token


def test_it_compiles_where_nothing_can_be_written(monkeypatch: pytest.MonkeyPatch):
    """A package and a home that are read-only, as in a container: then each process compiles for itself."""
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])
    with pytest.raises(RuntimeError, match="cannot cache"):
        numba.njit(cache=True)(lambda x: x + 1)
    assert compiled(lambda x: x + 1)(2) == 3


@pytest.mark.parametrize("damage", ["garbage in the index", "an empty index", "code cut short", "a full disk"])
def test_a_cache_on_disk_only_saves_time(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A damaged file is compiled anew, and mended; what cannot be written is not kept."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def twice(x: int) -> int:
        return x * 2

    if damage == "a full disk":

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(IndexDataCacheFile, "save", full)
        assert compiled(twice)(4) == 8
        return
    assert compiled(twice)(4) == 8
    pattern, content = {"g": ("*.nbi", b"garbage"), "a": ("*.nbi", b""), "c": ("*.nbc", b"x")}[damage[0]]
    (file,) = tmp_path.rglob(pattern)
    file.write_bytes(content)
    assert compiled(twice)(4) == 8
    assert len(file.read_bytes()) > 100, "the next one compiles again"
    assert compiled(twice)(4) == 8


def test_backends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    assert choose_backend("auto", "cpu", torch.float32)._threads is None, "the loop as plain Python would take minutes"
    monkeypatch.delenv("NUMBA_DISABLE_JIT")
    assert choose_backend("auto", "cpu", torch.float32)._threads is not None
    assert isinstance(choose_backend("auto", "cpu", torch.float32), CPUAttention)
    assert isinstance(choose_backend("cpu", "cuda", torch.float32), CPUAttention)


def test_a_budget_smaller_than_a_block_is_refused():

    with pytest.raises(UserError, match="one block takes"):
        plan_num_blocks(EngineConfig(kv_cache_memory="100"), tiny_config(KV_HEADS, DIM), torch.float32, "cpu")
    assert plan_num_blocks(EngineConfig(num_blocks=3), tiny_config(KV_HEADS, DIM), torch.float32, "cpu") == 3
