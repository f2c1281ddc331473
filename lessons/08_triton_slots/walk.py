# %% [markdown]
# # 08 Triton from zero: slots and stores
# The kernels run in Triton's interpreter: Python instead of a GPU, one program instance after the other, the same
# addresses. Triton decides between the two while it is imported, so the variable comes first.

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"

import inspect
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
import triton
import triton.language as tl

from nanopd.kernels import kv_store, paged_attention
from nanopd.kernels.kv_store import store_kv
from nanopd.kernels.slot_mapping import slot_mapping
from nanopd.worker.kv_memory import KVCache
from nanopd_lessons import drive, grading, show

assert paged_attention.INTERPRETED, "set TRITON_INTERPRET before anything imports triton"


# %% [markdown]
# ## A first kernel
# It doubles `n` numbers, four in a program. What comes in for `x` and `out` is an address; `program_id` says which
# program it is.


# %%
@triton.jit
def double(x, out, n, PER_PROGRAM: tl.constexpr):
    i = tl.program_id(0) * PER_PROGRAM + tl.arange(0, PER_PROGRAM)
    tl.store(out + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


x, out = torch.arange(10.0), torch.full((16,), -7.0)
with drive.accesses() as seen:
    double[(3,)](x, out, 10, PER_PROGRAM=4)
assert out.tolist() == [0, 2, 4, 6, 8, 10, 12, 14, 16, 18] + [-7] * 6

# %% [markdown]
# `drive.accesses` notes what each program really touched. Three programs for ten numbers; the mask cuts the last one
# short.


# %%
def elements(access: drive.Access, tensor: torch.Tensor) -> list[int]:
    """The elements of this tensor that were touched, as numbers from its start."""
    return [(a - tensor.data_ptr()) // access.itemsize for a in access.addresses]


rows = [(a.program[0], a.kind, elements(a, x if a.kind == "load" else out)) for a in seen]
show.table("what each program touched", ("program", "does", "elements"), rows)
assert rows[:2] == [(0, "load", [0, 1, 2, 3]), (0, "store", [0, 1, 2, 3])]
assert rows[4:] == [(2, "load", [8, 9]), (2, "store", [8, 9])]


# %% [markdown]
# Without the mask on the store: nothing complains. The two numbers behind the end are gone.


# %%
@triton.jit
def careless(x, out, n, PER_PROGRAM: tl.constexpr):
    i = tl.program_id(0) * PER_PROGRAM + tl.arange(0, PER_PROGRAM)
    tl.store(out + i, tl.load(x + i, mask=i < n, other=0.0) * 2)


out.fill_(-7)
careless[(3,)](x, out, 10, PER_PROGRAM=4)
assert out[10:].tolist() == [0, 0, -7, -7, -7, -7], "12 elements were written, 10 were ours"

# %% [markdown]
# ## Slot mapping: one program, one request
# A mixed batch: A computes 5 tokens up to position 36, B one at position 89, C its first two. Blocks hold 16 tokens.
# What a table holds behind a request's last block is garbage; here a number that would show.

# %%
GARBAGE = 1 << 30
tables = {"A": [7, 2, 9], "B": [4, 1, 8, 3, 0, 6], "C": [5]}
block_table = torch.full((3, 6), GARBAGE, dtype=torch.int32)
for row, blocks in enumerate(tables.values()):
    block_table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
positions = torch.tensor([32, 33, 34, 35, 36, 89, 0, 1])
query_start_loc = torch.tensor([0, 5, 6, 8], dtype=torch.int32)
slots = torch.empty(12, dtype=torch.int64)  # four rows more than there are tokens
with drive.accesses() as seen:
    slot_mapping(positions, query_start_loc, block_table, 16, slots)


def by_rule(request: str, position: int) -> int:
    """K1."""
    return tables[request][position // 16] * 16 + position % 16


expected = [by_rule(request, position) for request, position in zip("AAAAABCC", positions.tolist())]
assert slots.tolist() == [*expected, -1, -1, -1, -1]
assert expected == [144, 145, 146, 147, 148, 105, 80, 81]

# %% [markdown]
# Program 0 in detail: two bounds, five positions, five times the same table entry, five slots. The garbage was never
# loaded.

# %%
names = {"positions": positions, "query_start_loc": query_start_loc, "block_table": block_table, "out": slots}
rows = []
for a in seen:
    name = next(name for name, tensor in names.items() if a.within(tensor))
    rows.append((a.program[0], a.kind, name, elements(a, names[name]), a.num_bytes))
show.table("slot mapping", ("program", "does", "what", "elements", "bytes"), rows)
assert {program for program, *_ in rows} == {0, 1, 2}
assert rows[2][1:4] == ("load", "positions", [0, 1, 2, 3, 4])
assert rows[3][1:4] == ("load", "block_table", [2, 2, 2, 2, 2]), "neighbours read the same entry"
assert rows[4][1:] == ("store", "out", [0, 1, 2, 3, 4], 40)
touched = {i for _, _, name, found, _ in rows if name == "block_table" for i in found}
assert all(block_table.flatten()[i] != GARBAGE for i in touched)

# %% [markdown]
# ## KV store: one program, one token
# The sizes of SmolLM2-135M: 3 KV heads of 64 in bfloat16, so a token's keys are 384 bytes. The cache is full of -7.
# One token goes to slot 105.

# %%
HEADS, DIM, BLOCK = 3, 64, 16
sizes = SimpleNamespace(num_layers=2, num_kv_heads=HEADS, head_dim=DIM)


def cache_of(layout: str, num_blocks: int = 12) -> KVCache:
    cache = KVCache.allocate(sizes, num_blocks, BLOCK, layout, torch.bfloat16, "cpu")
    cache.memory.fill_(-7)
    return cache


chance = torch.Generator().manual_seed(0)
key, value = torch.randn(2, 1, HEADS, DIM, generator=chance).bfloat16()
cache = cache_of("kv_first")
with drive.accesses() as seen:
    store_kv(key, value, *cache.layers[1], torch.tensor([105]))
rows = []
for a in seen:
    where = "the cache" if a.within(cache.memory) else "slots" if a.itemsize == 8 else "key or value"
    rows.append((a.kind, where, len(a.addresses), a.num_bytes))
show.table("program 0 of the KV store", ("does", "where", "elements", "bytes"), rows)
assert rows == [
    ("load", "slots", 1, 8),
    ("load", "key or value", 192, 384),
    ("store", "the cache", 192, 384),
    ("load", "key or value", 192, 384),
    ("store", "the cache", 192, 384),
]

# %% [markdown]
# The kernel's arrays are 4 x 64, since sides must be powers of two. The fourth head is masked: without the mask it
# would be head 0 of the next slot.

# %%
written = (cache.memory != -7).sum().item()
assert written == 2 * HEADS * DIM == 384, "K and V of one token, and nothing else in the whole allocation"
k_cache, v_cache = cache.layers[1]
assert torch.equal(k_cache[6, 9], key[0]) and torch.equal(v_cache[6, 9], value[0]), "slot 105 is block 6, row 9"
first, last = seen[2].addresses[0], seen[2].addresses[-1]
assert last - first == 382 and list(seen[2].addresses) == list(range(first, last + 1, 2)), "one run of memory"

# %% [markdown]
# ## Strides, not shapes
# The same kernel, the same arguments, three layouts. Only the strides differ, and with them the address.

# %%
rows = []
for layout in ("kv_first", "blocks_first", "cross_layer"):
    cache = cache_of(layout)
    with drive.accesses() as seen:
        store_kv(key, value, *cache.layers[1], torch.tensor([105]))
    at = [a.addresses[0] - cache.memory.data_ptr() for a in seen if a.kind == "store"]
    k_cache, v_cache = cache.layers[1]
    rows.append((layout, str(k_cache.stride()), *at))
    assert torch.equal(k_cache[6, 9], key[0]) and torch.equal(v_cache[6, 9], value[0])
    assert (cache.memory != -7).sum() == 384
show.table("slot 105 of layer 1", ("layout", "strides in elements", "keys at byte", "values at byte"), rows)
assert len({row[2] for row in rows}) == 3, "three layouts, three places"
assert rows[0][1:] == ("(3072, 192, 64, 1)", 2 * 12 * 6144 + 105 * 384, 3 * 12 * 6144 + 105 * 384)
assert rows[1][1:] == ("(6144, 192, 64, 1)", (2 * 12 + 2 * 6) * 6144 + 9 * 384, (2 * 12 + 2 * 6 + 1) * 6144 + 9 * 384)
assert rows[2][1:] == ("(12288, 192, 64, 1)", (4 * 6 + 2) * 6144 + 9 * 384, (4 * 6 + 3) * 6144 + 9 * 384)

# %% [markdown]
# The same on the other side: keys and values are often slices of one fused product. Their rows are far apart, nothing
# is copied first.

# %%
fused = torch.randn(5, 9 + 3 + 3, DIM, generator=chance).bfloat16()  # 9 query heads, then keys, then values
key, value = fused[:, 9:12], fused[:, 12:]
assert key.stride() == (960, 64, 1) and not key.is_contiguous()
cache = cache_of("cross_layer")
store_kv(key, value, *cache.layers[0], torch.tensor([3, 40, 41, 100, 17]))
assert torch.equal(cache.layers[0][0][40 // 16, 40 % 16], key[1])
assert torch.equal(cache.layers[0][1][17 // 16, 17 % 16], value[4])

# %% [markdown]
# ## Slot -1
# The question of the text: five decodes, padded to 8 rows. Eight programs; three of them load 8 bytes and end.

# %%
key, value = torch.randn(2, 8, HEADS, DIM, generator=chance).bfloat16()
padded = torch.tensor([3, 40, 41, 100, 17, -1, -1, -1])
cache = cache_of("kv_first")
with drive.accesses() as seen:
    store_kv(key, value, *cache.layers[1], padded)
per_program = {p: [a for a in seen if a.program[0] == p] for p in range(8)}
show.table(
    "bytes per program",
    ("program", "slot", "loaded", "stored"),
    [
        (p, padded[p].item(), *(sum(a.num_bytes for a in found if a.kind == kind) for kind in ("load", "store")))
        for p, found in per_program.items()
    ],
)
assert [len(found) for found in per_program.values()] == [5] * 5 + [1] * 3
assert [a.num_bytes for p in (5, 6, 7) for a in per_program[p]] == [8, 8, 8]
changed = (cache.memory != -7).sum().item() * 2
assert changed == 5 * 2 * 384 == 3840, "bytes of the cache that changed"

# %% [markdown]
# Now the real file with one line changed: the check never holds. Where is "slot -1"? Integer division in Triton
# rounds towards zero, so it is row -1 of block 0: one row *before* the cache that the kernel was given.

# %%
source = inspect.getsource(kv_store)
assert source.count("if slot < 0:") == 1
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "unchecked.py"
    file.write_text(source.replace("if slot < 0:", "if slot < -9:"))
    unchecked = grading.load(file)
    before = cache.memory.clone()
    unchecked.store_kv(key, value, *cache.layers[1], padded)
layer_kv = [(layer, kv) for layer in range(2) for kv in range(2) if (cache.memory != before)[layer, kv].any()]
assert layer_kv == [(0, 1), (1, 0)]
assert (cache.memory != before).sum() == 2 * 192
assert torch.equal(cache.layers[0][1][-1, -1], key[7]), "the last value of layer 0 is now a key of nobody"
assert torch.equal(cache.layers[1][0][-1, -1], value[7]), "and the last key of layer 1 a value"
show.say("destroyed: the last slot of layer 0's values, and the last slot of layer 1's keys")

# %% [markdown]
# In PyTorch and NumPy -1 means the last one. The mistake is the same, the victim another.

# %%
k_cache = torch.full((10, BLOCK, HEADS, DIM), -7.0)
k_cache[padded // BLOCK, padded % BLOCK] = key.float()
assert torch.equal(k_cache[9, 15], key[7].float()), (
    "-1 // 16 is -1 here, and -1 % 16 is 15: the last slot of the last block"
)

# %% [markdown]
# ## Coalescing, counted
# A GPU moves memory in sectors of 32 bytes. Which share of what is moved was asked for? The addresses are those
# recorded, or follow from the strides.

# %%
SECTOR = 32


def moved(addresses: list[int], itemsize: int) -> int:
    """Bytes of the sectors that these elements lie in."""
    return SECTOR * len({byte // SECTOR for a in addresses for byte in (a, a + itemsize - 1)})


def share(addresses: list[int], itemsize: int) -> float:
    return len(set(addresses)) * itemsize / moved(addresses, itemsize)


many = torch.arange(1024)
table = torch.arange(64, dtype=torch.int32)[None]
with drive.accesses() as seen:
    slot_mapping(many, torch.tensor([0, 1024], dtype=torch.int32), table, BLOCK, torch.empty(1024, dtype=torch.int64))
with drive.accesses() as stored:
    store_kv(key[:1], value[:1], *cache.layers[0], torch.tensor([105]))
rows = [
    (what, len(a.addresses), len(set(a.addresses)) * a.itemsize, moved(list(a.addresses), a.itemsize))
    for what, a in (
        ("1024 positions", seen[2]),
        ("1024 x a table entry", seen[3]),
        ("1024 slots", seen[4]),
        ("keys of one token", stored[2]),
    )
]

# %% [markdown]
# For comparison a layout that puts the tokens innermost, (block, head, dim, slot). The kernel refuses it; its strides
# say what it would cost.

# %%
tokens_innermost = torch.zeros(10, HEADS, DIM, BLOCK, dtype=torch.bfloat16).permute(0, 3, 1, 2)
try:
    store_kv(key[:1], value[:1], tokens_innermost, tokens_innermost, torch.tensor([105]))
    raise SystemExit("not refused")
except AssertionError:
    pass
assert tokens_innermost.stride() == (3072, 1, 1024, 16)
scattered = [2 * (6 * 3072 + 9 + head * 1024 + dim * 16) for head in range(HEADS) for dim in range(DIM)]
rows.append(("the same, tokens innermost", len(scattered), len(scattered) * 2, moved(scattered, 2)))
show.table("asked for, and moved", ("what", "elements", "bytes asked for", "bytes moved"), rows)
assert [row[2:] for row in rows[:3]] == [(8192, 8192), (256, 256), (8192, 8192)]
assert rows[3][2:] == (384, 384), "12 sectors, all of them used"
assert rows[4][2:] == (384, 6144) and share(scattered, 2) == 1 / 16, "each element in a sector of its own"

# %% [markdown]
# ## 32 bits are not enough
# Llama-3-8B in `cross_layer`: from one block to the next there are 32 layers x 2 x 16 tokens x 8 heads x 128
# elements.

# %%
stride_block = 32 * 2 * 16 * 8 * 128
first_bad = 2**31 // stride_block
assert (stride_block, first_bad, first_bad * 16) == (1_048_576, 2048, 32_768), "the 2,048th block, 32,768 tokens"


@triton.jit
def offsets(table, stride, out32, out64):
    block = tl.load(table)  # int32, as block tables are
    tl.store(out32, block * stride)
    tl.store(out64, block.to(tl.int64) * stride)


found = torch.zeros(2, dtype=torch.int64)
offsets[(1,)](torch.tensor([first_bad], dtype=torch.int32), stride_block, found[:1], found[1:])
show.say(f"block {first_bad} lies {found[0]:,} elements from the start, or {found[1]:,}")
assert found.tolist() == [-(2**31), 2**31], "in 32 bits the product is negative: far before the cache"

# %% [markdown]
# ## In the engine
# A tiny model on the Triton backend, interpreted: the same tokens as on the CPU backend. Slots are mapped once a
# step, stored once a layer.

# %%
prompts = [list(range(10, 31)), list(range(50, 57)), list(range(90, 125))]
calls = {"slot_mapping": 0, "store_kv": 0}


def counting(name: str, real):
    def call(*args):
        calls[name] += 1
        return real(*args)

    return call


with tempfile.TemporaryDirectory() as folder, patch.object(grading, "model", lambda: Path(folder)):
    drive.tiny_model(Path(folder))  # two layers
    plain = grading.generate(prompts, max_tokens=4, attention_backend="cpu")
    with (
        patch("nanopd.kernels.slot_mapping.slot_mapping", counting("slot_mapping", slot_mapping)),
        patch("nanopd.kernels.kv_store.store_kv", counting("store_kv", store_kv)),
    ):
        interpreted = grading.generate(prompts, max_tokens=4, attention_backend="triton")
assert interpreted == plain
show.table("calls of the host functions", ("function", "calls"), list(calls.items()))
assert calls == {"slot_mapping": 4, "store_kv": 8}, "4 steps; 2 layers in each"

# %% [markdown]
# ## Check yourself
# The questions of the text.

# %%
# 1. 200 tokens of one request, in blocks of 16.
with drive.accesses() as seen:
    wide = torch.arange(13, dtype=torch.int32)[None]
    starts = torch.tensor([0, 200], dtype=torch.int32)
    slot_mapping(torch.arange(200), starts, wide, BLOCK, torch.empty(200, dtype=torch.int64))
assert {a.program for a in seen} == {(0, 0, 0)} and len(set(seen[3].addresses)) == 13

# 2. Head dim 80: the kernel's array is 128 wide, so masked lanes of 8 heads.
assert triton.next_power_of_2(80) == 128 and 8 * (128 - 80) == 384

# 3. Two tokens with the same slot: the result depends on which program comes last.
twice = torch.tensor([5, 5])
cache = cache_of("kv_first")
store_kv(key[:2], value[:2], *cache.layers[0], twice)
assert torch.equal(cache.layers[0][0][0, 5], key[1]), "the interpreter goes in order; a GPU promises nothing"
