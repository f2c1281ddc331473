# %% [markdown]
# # 09 Paged attention
# First the softmax, in plain torch. Then the real kernel, in Triton's interpreter. Then what compilers make of it,
# for GPUs that are not here.

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import torch
import triton

from nanopd.config import EngineConfig, SamplingParams
from nanopd.engine.core import EngineCore
from nanopd.kernels import paged_attention as kernels
from nanopd.kernels.paged_attention import Tiles, choose_tiles, paged_attention
from nanopd.request import Request
from nanopd.trace.events import Sampled
from nanopd.trace.file import read
from nanopd_lessons import drive, show

assert kernels.INTERPRETED, "set TRITON_INTERPRET before anything imports triton"
INF = math.inf

# %% [markdown]
# ## Softmax needs the maximum
# float32 ends at about 3.4e38. exp(89) is beyond it, so a score of 100 makes the plain formula inf / inf. Shifted by
# the maximum, nothing is larger than exp(0).

# %%
large = torch.tensor([100.0, 99.0, 0.0])
assert torch.tensor(88.0).exp() < INF and torch.tensor(89.0).exp() == INF
assert large.exp()[0] == INF and (large.exp() / large.exp().sum()).isnan().any()
shifted = (large - large.max()).exp()
assert torch.allclose(shifted / shifted.sum(), large.softmax(0)) and shifted.max() == 1

# %% [markdown]
# ## ... but the maximum is known only at the end
# Twelve scores arrive in tiles of four. What was summed so far is in terms of the old maximum; one factor, exp(old -
# new), puts it in terms of the new one.

# %%
scores = torch.tensor([2.0, 4, 1, 3, 8, 5, 0, 7, 6, 2, 3, 1])
values = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))
running_max, running_sum, acc = torch.tensor(-INF), torch.tensor(0.0), torch.zeros(2)
rows = []
for first in range(0, 12, 4):
    tile, v = scores[first : first + 4], values[first : first + 4]
    new_max = torch.maximum(running_max, tile.max())
    shrink = (running_max - new_max).exp()
    weight = (tile - new_max).exp()
    running_sum = running_sum * shrink + weight.sum()
    acc = acc * shrink + weight @ v
    running_max = new_max
    rows.append((str(tile.int().tolist()), running_max.item(), shrink.item(), running_sum.item()))
    so_far = scores[: first + 4]
    assert torch.allclose(running_sum, (so_far - so_far.max()).exp().sum()), (
        "right after each tile, not only at the end"
    )
show.table("online softmax", ("tile", "maximum", "shrink", "sum"), rows)
assert [row[1] for row in rows] == [4, 8, 8] and [round(row[3], 2) for row in rows] == [1.55, 1.45, 1.59]
assert rows[0][2] == 0 and math.isclose(rows[1][2], math.exp(-4), rel_tol=1e-6) and rows[2][2] == 1
assert torch.allclose(acc / running_sum, scores.softmax(0) @ values), "equal to the softmax over all twelve"

# %% [markdown]
# A tile in which nothing may be seen is all -inf. Then -inf - (-inf) is NaN, and one NaN spoils the row for good. The
# kernel subtracts 0 instead.

# %%
hidden = torch.full((4,), -INF)
assert (hidden - hidden.max()).isnan().all()
pivot = hidden.max() if hidden.max() > -INF else torch.tensor(0.0)
assert (hidden - pivot).exp().tolist() == [0, 0, 0, 0]

# %% [markdown]
# ## The real kernel on a mixed batch
# The three requests of worker/attention.py: a chunk of 5, a decode, a first chunk of 2. Slots that no token of theirs
# occupies hold NaN; table entries behind the last block hold a block that does not exist.

# %%
BLOCK, HEADS, KV_HEADS, DIM = 16, 8, 2, 32
chance = torch.Generator().manual_seed(1)


def make_batch(requests: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    """`requests`: (new tokens, tokens in all)."""
    used = [-(-total // BLOCK) for _, total in requests]
    order = torch.randperm(sum(used) + 2, generator=chance).int()
    table = torch.full((len(requests), max(used) + 1), 1 << 30, dtype=torch.int32)
    k_cache, v_cache = torch.full((2, len(order), BLOCK, KV_HEADS, DIM), math.nan)
    for r, (_, total) in enumerate(requests):
        table[r, : used[r]], order = order[: used[r]], order[used[r] :]
        j = torch.arange(total)
        at = table[r, j // BLOCK].long(), j % BLOCK
        k_cache[at], v_cache[at] = torch.randn(2, total, KV_HEADS, DIM, generator=chance)
    starts = torch.tensor([0, *(new for new, _ in requests)]).cumsum(0).int()
    query = torch.randn(int(starts[-1]), HEADS, DIM, generator=chance)
    lens = torch.tensor([total for _, total in requests], dtype=torch.int32)
    names = "query", "k_cache", "v_cache", "block_table", "query_start_loc", "seq_lens"
    return dict(zip(names, (query, k_cache, v_cache, table, starts, lens)))


def dense(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Token by token, head by head, in float64: what attention is."""
    query, k_cache, v_cache, table, starts, lens = batch.values()
    out = torch.zeros(query.shape, dtype=torch.float64)
    for r, total in enumerate(lens.tolist()):
        for t in range(starts[r], starts[r + 1]):
            j = torch.arange(total - int(starts[r + 1] - t) + 1)  # from the first key up to its own
            at = table[r, j // BLOCK].long(), j % BLOCK
            for h in range(HEADS):
                k, v = (cache[at][:, h // (HEADS // KV_HEADS)].double() for cache in (k_cache, v_cache))
                out[t, h] = (k @ query[t, h].double() * DIM**-0.5).softmax(0) @ v
    return out


SMALL = Tiles(rows=16, keys=32, num_warps=4, num_stages=2, num_splits=1)
batch = make_batch([(5, 37), (1, 90), (2, 2)])
assert batch["query_start_loc"].tolist() == [0, 5, 6, 8]
with drive.accesses() as seen:
    out = paged_attention(*batch.values(), DIM**-0.5, max_query_len=5, tiles=SMALL)
assert torch.allclose(out.double(), dense(batch), atol=1e-5) and not out.isnan().any()

# %% [markdown]
# ## Where a query stands
# The causal mask follows from two arrays: query i of request r stands at seq_len - query_len + i. A row per token, #
# seen, . not.

# %%
starts, lens = batch["query_start_loc"].tolist(), batch["seq_lens"].tolist()
positions = [[lens[r] - (starts[r + 1] - starts[r]) + i for i in range(starts[r + 1] - starts[r])] for r in range(3)]
assert positions == [[32, 33, 34, 35, 36], [89], [0, 1]]
for name, request, total in zip("ABC", positions, lens):
    for position in request:
        show.say(f"  {name} {position:>3}  {'#' * (position + 1)}{'.' * (total - position - 1)}")
k = batch["k_cache"].clone()
k[batch["block_table"][0, 2], 36 % BLOCK] = 9  # A's last key becomes another one
changed = (paged_attention(batch["query"], k, *list(batch.values())[2:], DIM**-0.5, max_query_len=5) - out).abs() > 1e-4
assert changed.any(-1).any(-1).tolist() == [False] * 4 + [True] + [False] * 3, "only the token at 36 sees it"

# %% [markdown]
# ## One program, tile by tile
# The loads of the program that has B's decode and KV head 0. Each tile: 32 table entries, then K, then V, a row
# wherever its block is.

# %%


def kind_of(access: drive.Access, batch: dict[str, torch.Tensor]) -> str:
    for name, tensor in batch.items():
        if access.kind == "load" and access.within(tensor):
            return "k or v" if "cache" in name else name
    return "out"


b_alone = make_batch([(1, 90)])
with drive.accesses() as seen:
    one = paged_attention(*b_alone.values(), DIM**-0.5, max_query_len=1, tiles=SMALL)
rows = [(kind_of(a, b_alone), len(a.addresses), a.num_bytes) for a in seen if a.program == (0, 0, 0)]
show.table("program (0, 0, 0)", ("what", "elements", "bytes"), rows)
kinds = [row[0] for row in rows]
assert kinds == ["query_start_loc"] * 2 + ["seq_lens", "query"] + ["block_table", "k or v", "k or v"] * 3 + ["out"]
assert [row[1] for row in rows if row[0] == "block_table"] == [32, 32, 26], "90 keys in tiles of 32"
assert rows[3][1] == rows[-1][1] == 4 * DIM == 128, "four of its sixteen rows are real: the heads of the group"
first_tile = next(a for a in seen if kind_of(a, b_alone) == "block_table")
assert len(set(first_tile.addresses)) == 2, "32 keys, two blocks of 16"
assert {a.program for a in seen} == {(0, 0, 0), (0, 1, 0)}

# %% [markdown]
# What no query may see is never loaded: the addresses are exactly those of the 90 keys and values.

# %%
k_cache, v_cache, table = b_alone["k_cache"], b_alone["v_cache"], b_alone["block_table"][0]
wanted = set()
for cache in (k_cache, v_cache):
    for j in range(90):
        row = cache[table[j // BLOCK], j % BLOCK]
        wanted |= {row.data_ptr() + 4 * i for i in range(KV_HEADS * DIM)}
loaded = [a for access in seen if kind_of(access, b_alone) == "k or v" for a in access.addresses]
assert set(loaded) == wanted and len(loaded) == len(wanted) == 2 * 90 * KV_HEADS * DIM, "each of them once"

# %% [markdown]
# ## Grouped heads share the loads
# Eight query heads, two KV heads. The same attention with a copy of K and V for every query head: equal result, four
# times the bytes.

# %%
copies = dict(b_alone) | {name: b_alone[name].repeat_interleave(4, 2) for name in ("k_cache", "v_cache")}
with drive.accesses() as seen_apart:
    apart = paged_attention(*copies.values(), DIM**-0.5, max_query_len=1, tiles=SMALL)
shared_bytes = sum(access.num_bytes for access in seen if kind_of(access, b_alone) == "k or v")
apart_bytes = sum(access.num_bytes for access in seen_apart if kind_of(access, copies) == "k or v")
assert torch.allclose(one, apart, atol=1e-6)
assert (shared_bytes, apart_bytes) == (2 * 90 * 2 * 32 * 4, 2 * 90 * 8 * 32 * 4) == (46_080, 184_320)
show.table("bytes of K and V loaded", ("heads", "bytes"), [("2, shared by 4 each", shared_bytes), ("8", apart_bytes)])
flops, bf16_bytes = 4 * 4 * 90 * DIM, 2 * 90 * DIM * 2  # of one program: 4 rows; two products; K and V
assert flops / bf16_bytes == 4, "FLOPs a byte in bfloat16: the size of the group. A prefill with 128 rows has 128"

# %% [markdown]
# ## Splits
# The same decode by four programs for each KV head, each on a part of the context. Every part is divided by its own
# sum; the logarithm of that sum goes with it.

# %%
caught = {}


def catching(part, part_lse, *rest):
    caught["part"], caught["lse"] = part.clone(), part_lse.clone()
    return merge(part, part_lse, *rest)


merge = kernels.merge_partials
four = Tiles(rows=16, keys=32, num_warps=4, num_stages=2, num_splits=4)
with patch.object(kernels, "merge_partials", catching), drive.accesses() as seen:
    split = paged_attention(*b_alone.values(), DIM**-0.5, max_query_len=1, tiles=four)
attention_programs = {a.program for a in seen if kind_of(a, b_alone) == "k or v"}
assert attention_programs == {(0, head, s) for head in (0, 1) for s in (0, 1, 2)}
per_split = [
    sum(len(a.addresses) for a in seen if a.program == (0, 0, s) and kind_of(a, b_alone) == "block_table")
    for s in range(4)
]
lse = caught["lse"][0, 0]
show.table("head 0", ("split", "keys", "log of the sum"), [(s, per_split[s], lse[s].item()) for s in range(4)])
assert per_split == [32, 32, 26, 0], "whole tiles; the last split has nothing to do"
assert lse[3] == -INF and lse[:3].isfinite().all()

# %% [markdown]
# ## The merge
# exp(lse) is a part's sum, so it says how much the part weighs. Again the maximum is taken out first. The empty part
# weighs exp(-inf) = 0.

# %%
part = caught["part"][0, 0]
weight = (lse - lse.max()).exp()
by_hand = (weight[:3, None] * part[:3]).sum(0) / weight.sum()
assert torch.allclose(by_hand, split[0, 0], atol=1e-6) and weight[3] == 0
assert torch.allclose(split, one, atol=1e-6), "four programs and one say the same"
assert not torch.equal(split, one), "but not to the last bit: sums in another order"
plain_mean = part[:3].mean(0)
assert not torch.allclose(plain_mean, one[0, 0], atol=1e-3), "parts do not weigh the same"
total_lse = lse.max() + weight.sum().log()
q, k = b_alone["query"][0, 0], k_cache[table[torch.arange(90) // BLOCK].long(), torch.arange(90) % BLOCK, 0]
assert torch.allclose(total_lse, (k @ q * DIM**-0.5).logsumexp(0)), "the log-sum-exp of all 90 scores"

# %% [markdown]
# ## When a split pays
# Llama-3-8B (32 heads, 8 KV heads, head dim 128) on a chip with 132 processors. `choose_tiles` wants four programs
# for each; it cuts nothing shorter than 256 keys.

# %%
rows = []
for reqs, length in ((1, 200), (1, 1024), (1, 4096), (1, 32768), (4, 4096), (16, 4096), (64, 4096)):
    t = choose_tiles(reqs, reqs, 8, 4, 2, 1, length, 132, 227 * 1024)
    rows.append((reqs, length, 8 * reqs, t.num_splits, 8 * reqs * t.num_splits))
show.table("decodes on 132 processors", ("requests", "context", "programs unsplit", "splits", "programs"), rows)
assert [row[3] for row in rows] == [1, 4, 16, 32, 16, 4, 1]
assert rows[2][2:] == (8, 16, 128) and rows[6][2:] == (512, 1, 512)
kv_bytes = 2 * 4096 * 8 * 128 * 2
part_bytes = 2 * 16 * 32 * (128 + 1) * 4  # written by the splits, read by the merge
assert (kv_bytes, part_bytes) == (16_777_216, 528_384)
show.say(f"16 splits of 4,096 keys: {part_bytes:,} bytes more, {part_bytes / kv_bytes:.1%} of K and V")
assert round(100 * part_bytes / kv_bytes) == 3

# %% [markdown]
# ## Without a GPU: what the compiler made of it
# The interpreter and the compiler exclude each other, so this is another process. It compiles the attention kernel
# for an A100 (sm_80) and an H100 (sm_90): half a minute at most.

# %%
wanted_kernels = {
    "decode, A100": ("sm_80", "llama-3-8b", "decode"),
    "prefill, H100": ("sm_90", "llama-3-8b", "prefill"),
    "small prefill, A100": ("sm_80", "smollm2-135m", "prefill"),
}
here = Path(__file__).resolve().parent
with tempfile.TemporaryDirectory() as cache:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, here / "compiled.py", *(word for words in wanted_kernels.values() for word in words)]
    done = subprocess.run(
        command, env=environment | {"TRITON_CACHE_DIR": cache}, stdout=subprocess.PIPE, text=True, check=True
    )
compiled = dict(zip(wanted_kernels, map(json.loads, done.stdout.splitlines())))

# %% [markdown]
# Registers are counted per thread, 65,536 for each processor. Shared memory is counted per program; an A100's
# processor has 164 KiB, an H100's 228, and each program costs 1 KiB extra.

# %%
rows = []
for name, found in compiled.items():
    threads, sm_shared = 32 * found["tiles"]["num_warps"], (164 if "A100" in name else 228) * 1024
    by_registers = 65_536 // (found["registers"] * threads)
    by_shared = sm_shared // (found["shared"] + 1024)
    found["fit"] = min(by_registers, by_shared)
    rows.append((name, threads, found["registers"], found["spills"], found["shared"], by_registers, by_shared))
    assert 0 < found["registers"] <= 255 and found["shared"] <= found["shared_limit"]
columns = "kernel", "threads", "registers", "spills", "shared", "fit: registers", "fit: shared"
show.table("compiled", columns, rows)
decode, prefill, small = compiled.values()
assert decode["spills"] == prefill["spills"] == 0 and small["spills"] <= 64
assert decode["fit"] == 4, "four decode programs on a processor at a time, bound by shared memory"
assert prefill["fit"] == 1 and prefill["registers"] > 128, "one prefill program, bound by registers"
if triton.__version__ == "3.9.0":  # another compiler allots registers in another way
    assert [found["registers"] for found in compiled.values()] == [80, 254, 128] and small["spills"] == 8
    assert 65_536 // (80 * 128) == 6 and 65_536 // (254 * 256) == 1
tile_bytes = 32 * 128 * 2
assert decode["tiles"]["keys"] == 32 and tile_bytes == 8192
assert decode["shared"] >= 4 * tile_bytes == 32_768, "two tiles of K and two of V on their way"

# %% [markdown]
# Cascade: four requests that begin with the same 512 tokens, in the real engine. The first computes them, the others find
# them; then they are read once for all four, and the tokens are the same as without.

# %%
rest = {"a": [7], "b": [8, 9], "c": [10, 11, 12], "d": [13]}
answers, depths, saved = {}, {}, {}
with tempfile.TemporaryDirectory() as directory:
    path = drive.tiny_model(Path(directory))
    for cascade in (False, True):
        trace = f"{directory}/{cascade}.jsonl"
        options = {"num_blocks": 80, "attention_backend": "cpu", "cascade_attention": cascade, "trace": trace}
        core = EngineCore(EngineConfig(model=str(path), dtype="float32", **options))
        for name, own in rest.items():
            prompt = [i % 250 for i in range(512)] + own
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, seed=0)
            core.add_request(Request(name, prompt, params))
        answers[cascade] = {name: [] for name in rest}
        while core.has_unfinished_requests():
            for news in core.step():
                answers[cascade][news.request_id] += news.new_token_ids
        sampled = (line.event for line in read(Path(trace))[1] if isinstance(line.event, Sampled))
        depths[cascade] = [event.num_common_prefix_blocks for event in sampled]
        saved[cascade] = core.stats()[0].cascade_saved_tokens
show.say(f"blocks read once for all, step by step: {depths[True]}")
assert answers[True] == answers[False]
assert not any(depths[False]) and depths[True][0] == 0, "the prefix is being computed: nobody may see all of it"
assert set(depths[True][1:]) == {512 // 16}
assert saved == {False: 0, True: sum(depths[True]) * 16 * 3}, "three of the four did not read them"
assert 1024 + 64 * 32 == 3072 and 64 * (1024 + 32) == 67_584

# %% [markdown]
# A few lines of the PTX. cp.async goes from memory to shared memory without waiting; mma multiplies on tensor cores,
# wgmma is the H100's for four warps at a time; ex2 is the exponential.

# %%
for name in ("decode, A100", "prefill, H100"):
    lines = compiled[name]["ptx"]
    show.say(f"\n{name}:")
    for word in ("ld.global", "cp.async", "mma.", "ex2", "st.global"):
        found = [line for line in lines if word in line]
        assert found, f"{name} has no {word}"
        show.say(f"  {len(found):>4} x {word:<10} {found[0][:90]}")
assert any("mma.sync" in line for line in decode["ptx"]) and not any("wgmma" in line for line in decode["ptx"])
assert any("wgmma.mma_async" in line for line in prefill["ptx"])
wide = [line for line in decode["ptx"] if "cp.async.cg" in line and "0x10" in line]
assert wide, "16 bytes a thread: eight numbers of a head in one instruction"

# %% [markdown]
# A chip with little shared memory: 64 KiB. The chooser knows, and takes fewer stages.

# %%
small_chip = choose_tiles(64, 64, 8, 4, 2, 1, 4096, 40, 64 * 1024)
large_chip = choose_tiles(64, 64, 8, 4, 2, 1, 4096, 132, 227 * 1024)
assert (small_chip.num_stages, large_chip.num_stages) == (3, 5) and 64 * 1024 == 65_536

# %% [markdown]
# One kernel, MI300X: 1 KiB too much is too much (vLLM issue 12498). And how many scores a plain softmax would write
# for each head.

# %%
assert 66_560 - 65_536 == 1024
assert 8192 * 4096 == 33_554_432

# %% [markdown]
# ## Check yourself
# The questions of the text.

# %%
# 1. Tiles with maxima 3, 7, 5: what was summed after the first is scaled by exp(-4), then by 1.
assert math.exp(3 - 7) < 0.02 and max(3, 7, 5) == 7
# 2. Two parts with sums 30 and 10 weigh 3/4 and 1/4.
lses = torch.tensor([30.0, 10.0]).log()
assert torch.allclose(lses.softmax(0), torch.tensor([0.75, 0.25]))
# 3. Qwen3-0.6B, 8 KV heads: four requests on 132 processors.
assert 8 * 4 == 32 and choose_tiles(4, 4, 8, 2, 2, 1, 600, 132, 227 * 1024).num_splits == 2
# 4. A chunk of 4 after 100 tokens: the keys that each query sees.
assert [104 - 4 + i + 1 for i in range(4)] == [101, 102, 103, 104]
