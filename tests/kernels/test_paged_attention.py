"""Paged attention against float64 (T1, T2). Every batch is poisoned: NaN in all slots that hold no token, in `out`, and
garbage in the block table beyond the used entries, which crashes when it is followed."""

import dataclasses
import itertools
import random

import pytest
import torch

from nanopd.kernels.paged_attention import Tiles, choose_tiles, merge_partials, num_query_tiles, paged_attention
from tests.bench.kernels import paged_attention_cost

from .batches import DEVICE, LAYOUTS, assert_close, fresh_seed, make_batch
from .reference import paged_attention_reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GRID = list(itertools.product((64, 80, 128), range(1, 9), (16, 32, 64), DTYPES, LAYOUTS))
GPU = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
SMALL = Tiles(rows=16, keys=16, num_warps=4, num_stages=2, num_splits=1)  # many tiles even in a short context


def check(batch, window=None, causal=True, looser=1, **options):
    """Run the kernel and compare, with a tolerance so many times looser; returns what it wrote."""
    dtype, lse = batch.query.dtype, torch.full(batch.query.shape[:2], torch.nan, device=DEVICE)
    out = paged_attention(
        *batch.args(), max_query_len=batch.max_query_len, sliding_window=window, causal=causal, out=batch.poisoned_out(),
        lse=lse, **options,
    )  # fmt: skip
    want, want_lse = batch.expected(window, causal)
    assert_close(out, want, dtype, looser)
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=2e-3 if dtype != torch.float32 else 1e-5, atol=1e-3)
    return out


def check_point(dim, group, block_size, dtype, layout):
    """One point of T2's grid: ragged lengths around a block's end, decodes and chunks mixed; and a batch of decodes."""
    seed = fresh_seed()
    pick = random.Random(seed)
    shape = {"dim": dim, "group": group, "block_size": block_size, "dtype": dtype, "layout": layout, "seed": seed}
    edges = [1, block_size, block_size + 1]
    full, chunk = pick.choice(edges[1:]), pick.randint(2, 7)
    mixed = [(1, pick.choice(edges)), (full, full), (0, 0), (chunk, block_size + chunk), (1, pick.randint(1, 80))]
    pick.shuffle(mixed)
    check(make_batch(mixed, kv_heads=1, **shape), window=pick.choice([None, None, 5, block_size]))
    check(make_batch([(1, length) for length in edges], kv_heads=2, **shape))


@pytest.mark.parametrize("point", random.Random(0).sample(GRID, 14), ids=lambda p: "-".join(map(str, p)))
def test_sampled_grid(point):
    check_point(*point)


@pytest.mark.slow
@pytest.mark.parametrize("point", GRID, ids=lambda p: "-".join(map(str, p)))
def test_whole_grid(point):
    check_point(*point)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("point", GRID, ids=lambda p: "-".join(map(str, p)))
def test_whole_grid_on_the_device(point):
    check_point(*point)


MIXED = [(1, 1), (1, 16), (1, 17), (40, 40), (0, 0), (9, 75), (1, 100), (33, 64)]


@pytest.mark.parametrize("tiles", [None, SMALL, dataclasses.replace(SMALL, num_splits=3)])
@pytest.mark.parametrize("window", [None, 1, 20])
def test_mixed_batch(tiles, window):
    check(make_batch(MIXED, kv_heads=1), window=window, tiles=tiles)


@pytest.mark.parametrize("splits", [2, 3, 16])  # 16: more than there are tiles, so some parts see no key
def test_splits_agree_with_one_sweep(splits):
    batch = make_batch([(1, 1), (1, 48), (1, 97)], kv_heads=1, group=3)
    once = check(batch, tiles=SMALL)
    split = check(batch, tiles=dataclasses.replace(SMALL, num_splits=splits))
    torch.testing.assert_close(split, once, rtol=1e-5, atol=1e-5)


def test_long_decode_is_split_by_itself():
    """The choice made inside leads through the merge here: one request, one KV head, 600 keys."""
    batch = make_batch([(1, 600)], kv_heads=1)
    assert choose_tiles(1, 1, 1, 2, 2, 1, 600, 1, 227 * 1024).num_splits == 2
    check(batch, max_seq_len=600)


def test_large_scores_do_not_overflow():
    batch = make_batch([(1, 70), (20, 33)], kv_heads=1)
    # A score of some 900 in float32 is off by up to 1e-4, and so is the logarithm of its weight.
    check(dataclasses.replace(batch, scale=30.0), looser=30, tiles=SMALL)


@pytest.mark.parametrize("tiles", [SMALL, dataclasses.replace(SMALL, num_splits=2)])
def test_padding_is_harmless(tiles):
    """A CUDA graph replays with padded rows: no tokens, or one token and no context, and rows behind the last request."""
    batch = make_batch([(1, 20), (1, 0), (1, 5), (0, 0), (0, 33)], kv_heads=1)
    out = check(batch, tiles=tiles)
    assert out[1].abs().max() == 0
    real = dataclasses.replace(batch, query=torch.cat([batch.query, torch.full_like(batch.query, torch.nan)]))
    got = paged_attention(*real.args(), max_query_len=1, out=real.poisoned_out(), tiles=tiles)
    torch.testing.assert_close(got[:3], out)


def test_a_batch_of_nobody():
    batch = make_batch([(0, 0), (0, 0)])
    assert check(batch).numel() == 0


def test_merge_of_parts():
    gen = torch.Generator().manual_seed(fresh_seed())
    tokens, heads, parts, dim = 3, 2, 5, 80
    part = torch.randn(tokens, heads, parts, dim, generator=gen)
    lse = torch.randn(tokens, heads, parts, generator=gen) * 30
    empty = torch.rand(tokens, heads, parts, generator=gen) < 0.3
    empty[0, 0], empty[1, 1] = True, torch.tensor([True, True, False, True, True])
    lse[empty], part[empty] = -torch.inf, torch.nan  # a part that saw no key may hold anything
    out, whole = torch.full((tokens, heads, dim), torch.nan, device=DEVICE), torch.full((tokens, heads), torch.nan)
    merge_partials(part.to(DEVICE), lse.to(DEVICE), out, whole := whole.to(DEVICE))
    weight = lse.double().exp()
    want = (part.double().nan_to_num() * weight[..., None]).sum(2) / weight.sum(2).clamp(min=1e-300)[..., None]
    assert_close(out, want, torch.float32)
    assert_close(whole, lse.double().logsumexp(2), torch.float32)
    assert out[0, 0].abs().max() == 0


def test_merge_serves_cascade_attention():
    """A common prefix once for all tokens of the batch (not causal), the rest by request, merged: the same as the whole."""
    prefix, own = 32, [(1, 5), (3, 20), (1, 17)]
    batch = make_batch([(q, prefix + s) for q, s in own], kv_heads=1)
    for r in range(1, len(own)):  # all share the blocks of the first
        batch.block_table[r, : prefix // 16] = batch.block_table[0, : prefix // 16]
    tokens = int(batch.query_start_loc[-1])
    parts, lse = (
        torch.full((tokens, 2, 2, 64), torch.nan, device=DEVICE),
        torch.full((tokens, 2, 2), torch.nan, device=DEVICE),
    )
    common = dataclasses.replace(
        batch, block_table=batch.block_table[:1], max_query_len=tokens,
        query_start_loc=torch.tensor([0, tokens], dtype=torch.int32, device=DEVICE),
        seq_lens=torch.tensor([prefix], dtype=torch.int32, device=DEVICE),
    )  # fmt: skip
    rest = dataclasses.replace(
        batch, block_table=batch.block_table[:, prefix // 16 :], seq_lens=batch.seq_lens - prefix
    )
    for i, part in enumerate((common, rest)):
        paged_attention(
            *part.args(), max_query_len=part.max_query_len, causal=i == 1, out=parts[:, :, i], lse=lse[:, :, i]
        )
    out = merge_partials(parts, lse, batch.poisoned_out())
    assert_close(out, batch.expected()[0], torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 9])
def test_the_pytorch_reference_is_right_too(dtype, window):
    batch = make_batch([(1, 1), (1, 33), (7, 20), (5, 5), (0, 0)], group=3, dim=80, layout="cross_layer", dtype=dtype)
    assert_close(paged_attention_reference(*batch.args(), sliding_window=window), batch.expected(window)[0], dtype)


def test_cost_counts_what_is_visible():
    # One decode of 10 keys, 4 heads on 2 KV heads, 8 dimensions, 2 bytes: K and V, Q and out; QK and PV.
    assert paged_attention_cost([1], [10], 4, 2, 8, 2) == (2 * 10 * 2 * 8 * 2 + 2 * 4 * 8 * 2, 4 * 10 * 4 * 8)
    # A chunk of 3 with nothing before it sees 1 + 2 + 3 keys; with a window of 2, 1 + 2 + 2.
    assert paged_attention_cost([3], [3], 1, 1, 1, 1)[1] == 4 * 6
    assert paged_attention_cost([3], [3], 1, 1, 1, 1, window=2) == (2 * 3 + 2 * 3, 4 * 5)
    assert paged_attention_cost([1], [100], 1, 1, 1, 1, window=8) == (2 * 8 + 2, 4 * 8)


H200 = (132, 227 * 1024)


def test_tiles_for_decode_and_prefill():
    decode = choose_tiles(64, 64, 8, 4, 2, 1, 4096, *H200)
    assert (decode.rows, decode.num_splits) == (16, 1)  # 512 programs, all resident at once
    alone = choose_tiles(1, 1, 8, 4, 2, 1, 4096, *H200)
    assert alone.num_splits == 16  # of 256 keys each
    assert choose_tiles(1, 1, 8, 4, 2, 1, 200, *H200).num_splits == 1
    prefill = choose_tiles(8192, 1, 8, 4, 2, 8192, 8192, *H200)
    assert (prefill.rows, prefill.keys, prefill.num_splits) == (128, 128, 1)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("shared_kib", [64, 163, 227])
def test_tiles_are_always_legal(itemsize, shared_kib):
    for group, query_len, reqs in itertools.product(range(1, 9), (1, 2, 3, 5, 17, 200), (1, 3, 64)):
        tiles = choose_tiles(query_len * reqs, reqs, 2, group, itemsize, query_len, 5000, 132, shared_kib * 1024)
        assert 16 <= tiles.rows <= 128
        assert tiles.rows >= group
        assert {n & (n - 1) for n in dataclasses.astuple(tiles)} <= {0, 1, 2, 4}  # powers of two, but for the stages
        assert 1 <= tiles.num_splits <= 32


def test_enough_query_tiles_for_any_spread():
    pick = random.Random(fresh_seed())
    for _ in range(500):
        lens = [pick.choice([0, 1, pick.randint(0, 50)]) for _ in range(pick.randint(1, 9))]
        tokens = pick.choice([1, 2, 5, 16, 42])
        assert sum(-(-n // tokens) for n in lens) <= num_query_tiles(sum(lens), len(lens), tokens, max(max(lens), 2))


@pytest.mark.gpu
@GPU
def test_replays_in_a_cuda_graph():
    """Captured once, replayed with other lengths and tables: nothing was read on the host."""
    batch, other = (make_batch(r, dtype=torch.bfloat16, dim=128) for r in ([(1, 90)] * 3, [(1, 7), (1, 64), (1, 33)]))
    out, static = batch.poisoned_out(), [x.clone() for x in batch.args()[:-1]]
    options = {"max_query_len": 1, "max_seq_len": 512, "out": out}
    paged_attention(*static, batch.scale, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention(*static, batch.scale, **options)
    blocks = min(len(static[1]), len(other.k_cache))
    static[0].copy_(other.query)
    for mine, theirs in ((static[1], other.k_cache), (static[2], other.v_cache)):
        mine.fill_(torch.nan)
        mine[:blocks] = theirs[:blocks]
    static[3][:, : other.block_table.shape[1]] = other.block_table[:, : static[3].shape[1]]
    static[5].copy_(other.seq_lens)
    graph.replay()
    assert_close(out, other.expected()[0], torch.bfloat16)
