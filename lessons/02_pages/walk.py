# %% [markdown]
# # 02 Pages: block, block table, slot, layout
# The real block tables, the real KV memory and one real engine. Blocks hold 16 tokens, as in the drawing.

# %%
import importlib.util
import os
import tempfile
from pathlib import Path
from random import Random
from unittest.mock import patch

import torch

from nanopd.config import LAYOUTS, EngineConfig, SamplingParams
from nanopd.core.kv_cache import KVCacheManager
from nanopd.engine.core import EngineCore
from nanopd.models.config import ModelConfig
from nanopd.request import Request
from nanopd.worker.attention import AttentionMetadata, CPUAttention
from nanopd.worker.kv_memory import KVCache, bytes_per_block, strides
from nanopd_lessons import drive, show


def model(num_layers: int, num_kv_heads: int, head_dim: int) -> ModelConfig:
    """A Llama's sizes, as far as its KV cache depends on them."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": num_layers, "vocab_size": 300}
    heads = {"num_attention_heads": num_kv_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_dim}
    return ModelConfig.from_hf({"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 512} | sizes | heads)


# %% [markdown]
# ## Why pages
# Memory for 8,192 tokens, and no request may be longer than 2,048. First with one row for each request, then with the
# real block tables. The requests' lengths are random, 100 to 600 tokens.

# %%
MEMORY, LONGEST, BLOCK_SIZE = 8192, 2048, 16
rows_that_fit = MEMORY // LONGEST

random = Random(2)
kv = KVCacheManager(MEMORY // BLOCK_SIZE, BLOCK_SIZE, prefix_caching=False)
lengths = []
while kv.allocate_slots(drive.request(f"r{len(lengths)}", length := random.randint(100, 600)), 0, length) is not None:
    lengths.append(length)
held = sum(len(table) for table in kv.tables.values()) * BLOCK_SIZE
waste_in_rows = 1 - sum(lengths[:rows_that_fit]) / MEMORY
waste_in_pages = 1 - sum(lengths) / held
show.table(
    "how many requests at once?",
    ("memory", "requests", "tokens reserved", "tokens stored", "reserved for nothing"),
    [
        ("one row each", rows_that_fit, MEMORY, sum(lengths[:rows_that_fit]), f"{waste_in_rows:.0%}"),
        ("pages", len(lengths), held, sum(lengths), f"{waste_in_pages:.1%}"),
    ],
)
assert (rows_that_fit, len(lengths)) == (4, 21)
assert (round(100 * waste_in_rows), round(100 * waste_in_pages, 1)) == (73, 1.7)
assert all(len(kv.tables[f"r{i}"]) * BLOCK_SIZE - n < BLOCK_SIZE for i, n in enumerate(lengths)), "only the last block"

# %% [markdown]
# Now every second request ends. The holes lie everywhere, and yet *all* that is free can be given to one request.

# %%
for i in range(0, len(lengths), 2):
    kv.free(f"r{i}")
held_ids = {block.block_id for table in kv.tables.values() for block in table}
free_ids = [i for i in range(len(kv.pool.blocks)) if i not in held_ids]
longest_hole, hole = 0, 0
for i in range(len(kv.pool.blocks)):
    hole = hole + 1 if i not in held_ids else 0
    longest_hole = max(longest_hole, hole)
free_tokens, hole_tokens = len(free_ids) * BLOCK_SIZE, longest_hole * BLOCK_SIZE
show.say(f"free: {free_tokens:,} tokens; longest hole: {hole_tokens:,}")
assert (free_tokens, hole_tokens) == (4816, 800)
assert kv.allocate_slots(drive.request("large", free_tokens), 0, free_tokens) is not None
assert sorted(kv.get_block_ids("large")) == free_ids, "the blocks need not be neighbours"

# %% [markdown]
# ## Block, block table, slot
# The request of the question: its table is 3, 7, 8. Where does its token 37 go?


# %%
def slot_of(table: list[int], position: int, block_size: int = 16) -> int:
    """Rule K1."""
    return table[position // block_size] * block_size + position % block_size


assert (37 // 16, 37 % 16) == (2, 5)
assert slot_of([3, 7, 8], 37) == 8 * 16 + 5 == 133
assert [slot_of([3, 7, 8], p) for p in (0, 15, 16, 31, 32)] == [48, 63, 112, 127, 128], "15 and 16 are not neighbours"

# %% [markdown]
# ## Slot mapping
# The engine's own function, for a batch of two requests: five tokens of a, one of b. The positions come from the batch,
# the blocks from the tables.


# %%
def plan(tables: list[list[int]], computed: list[int], new: list[int]) -> list[int]:
    """What the backend's `plan` writes into `slot_mapping`."""
    seq_lens = [c + n for c, n in zip(computed, new)]
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, *new], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=torch.tensor(tables, dtype=torch.int32),
        slot_mapping=torch.zeros(sum(new), dtype=torch.int64),
        query_lens_list=new,
        seq_lens_list=seq_lens,
    )
    positions = torch.tensor([p for c, n in zip(computed, new) for p in range(c, c + n)])
    CPUAttention().plan(metadata, positions, BLOCK_SIZE)
    return metadata.slot_mapping.tolist()


slots = plan([[3, 7, 8], [5, 1, 0]], computed=[35, 16], new=[5, 1])
show.table(
    "slot mapping of a batch",
    ("request", "position", "block", "slot"),
    [("a", 35 + i, [3, 7, 8][(35 + i) // 16], slot) for i, slot in enumerate(slots[:5])] + [("b", 16, 1, slots[5])],
)
assert slots == [131, 132, 133, 134, 135, 16]
assert slots[2] == slot_of([3, 7, 8], 37)

# %% [markdown]
# On a GPU the same is a kernel, and the batch may be padded: two tokens more that are nobody's. Their slot is -1. Here
# Triton's interpreter runs it.

# %%
if importlib.util.find_spec("triton"):
    os.environ["TRITON_INTERPRET"] = "1"
    from nanopd.kernels.slot_mapping import slot_mapping

    positions = torch.tensor([35, 36, 37, 38, 39, 16])
    starts, tables = torch.tensor([0, 5, 6], dtype=torch.int32), torch.tensor([[3, 7, 8], [5, 1, 0]], dtype=torch.int32)
    slot_mapping(positions, starts, tables, 16, padded := torch.zeros(8, dtype=torch.int64))
    assert padded.tolist() == [*slots, -1, -1]
else:
    show.say("Triton is not installed here; the kernel is left out.")

# %% [markdown]
# ## The engine does the same in every step
# A tiny model with random weights serves two prompts. We listen to `plan` and hold each slot against the block tables
# that the scheduler has. Two layers, and `plan` is called once a step: all layers use the same slots.

# %%
directory = tempfile.TemporaryDirectory()
path = drive.tiny_model(Path(directory.name), num_layers=2)
planned: list[list[int]] = []
calls = {"store": 0}


class Listening(CPUAttention):
    def plan(self, metadata, positions, block_size):
        super().plan(metadata, positions, block_size)
        planned.append(metadata.slot_mapping.tolist())

    def __call__(self, *args):
        calls["store"] += 1
        return super().__call__(*args)


def serve(layout: str) -> tuple[EngineCore, dict[str, list[int]]]:
    """The greedy tokens of two prompts, with every slot checked against rule K1."""
    options = {"num_blocks": 12, "max_model_len": 128, "kv_layout": layout, "attention_backend": "cpu"}
    with patch("nanopd.engine.core.choose_backend", lambda *_: Listening()):
        core = EngineCore(EngineConfig(model=str(path), dtype="float32", **options))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, seed=0)
    for name, prompt in (("a", range(10, 50)), ("b", range(100, 120))):
        core.add_request(Request(name, list(prompt), params))
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    while core.has_unfinished_requests():
        start = {i: r.num_computed_tokens for i, r in core.scheduler.requests.items()}
        tables = {}
        real = core.runner.execute_model

        def listen(output, real=real, tables=tables):
            tables.update({i: core.scheduler.kv.get_block_ids(i) for i in output.num_scheduled_tokens})
            tables["plan"] = dict(output.num_scheduled_tokens)
            return real(output)

        with patch.object(core.runner, "execute_model", listen):
            for news in core.step():
                tokens[news.request_id] += news.new_token_ids
        new = tables.pop("plan")
        assert planned[-1] == [slot_of(tables[i], p) for i, n in new.items() for p in range(start[i], start[i] + n)]
    return core, tokens


outputs = {layout: serve(layout)[1] for layout in LAYOUTS}
assert len(planned) == 3 * 6 and calls["store"] == 2 * len(planned), "a slot mapping a step, a store a layer"

# %% [markdown]
# The layout decides where bytes lie, and changes no token.

# %%
show.table("greedy tokens", ("layout", "a", "b"), [(k, str(v["a"]), str(v["b"])) for k, v in outputs.items()])
assert outputs["kv_first"] == outputs["blocks_first"] == outputs["cross_layer"]

# %% [markdown]
# ## Three layouts, by their strides
# The default model's sizes: 30 layers, 3 KV heads of 64, 16 bits. 32 blocks hold 512 tokens. The shapes, and the bytes
# from one index to the next.

# %%
smol = model(num_layers=30, num_kv_heads=3, head_dim=64)
caches = {layout: KVCache.allocate(smol, 32, 16, layout, torch.bfloat16, "cpu") for layout in LAYOUTS}
steps = {layout: strides(cache) for layout, cache in caches.items()}
shapes = {layout: tuple(cache.memory.shape) for layout, cache in caches.items()}
show.table("shapes", ("layout", "shape"), shapes.items())
assert shapes["kv_first"] == (30, 2, 32, 16, 3, 64)
assert shapes["blocks_first"] == (30, 32, 2, 16, 3, 64)
assert shapes["cross_layer"] == (32, 30, 2, 16, 3, 64)
show.table("strides in bytes", ("layout", *steps["kv_first"]), [(k, *v.values()) for k, v in steps.items()])
assert all((s["slot"], s["head"]) == (384, 128) for s in steps.values()), "inside a block all three are the same"
assert steps["kv_first"] == {"layer": 393_216, "kv": 196_608, "block": 6144, "slot": 384, "head": 128}
assert steps["blocks_first"] == {"layer": 393_216, "kv": 6144, "block": 12_288, "slot": 384, "head": 128}
assert steps["cross_layer"] == {"layer": 12_288, "kv": 6144, "block": 368_640, "slot": 384, "head": 128}
assert bytes_per_block(smol, 16, torch.bfloat16) == 368_640, "in cross_layer a step of one block is all of a block"

# %% [markdown]
# With strides an address is a sum. The value of slot 133 in layer 4, computed and then asked of torch:

# %%
for layout, cache in caches.items():
    s = steps[layout]
    block, rest = divmod(133, 16)
    by_strides = 4 * s["layer"] + 1 * s["kv"] + block * s["block"] + rest * s["slot"]
    assert by_strides == cache.layers[4][1][block, rest].data_ptr() - cache.memory.data_ptr()
    show.say(f"{layout:>12}: byte {by_strides:,}")
    assert layout != "kv_first" or by_strides == 1_820_544

# %% [markdown]
# ## How many pieces is a block?
# We take the real addresses of a block's keys and values in all layers, and join what touches. The memory has 64 blocks
# now: 32 of them are sent, no two of them neighbours, or all in a row.


# %%
def pieces(cache: KVCache, block_ids: list[int]) -> list[tuple[int, int]]:
    """The pieces of memory that these blocks are: (first byte, bytes)."""
    found: list[tuple[int, int]] = []
    halves = (half for layer in cache.layers for half in layer)
    for start, size in sorted((half[i].data_ptr(), half[i].nbytes) for half in halves for i in block_ids):
        if found and sum(found[-1]) == start:
            start, size = found[-1][0], found.pop()[1] + size
        found.append((start, size))
    return found


larger = {layout: KVCache.allocate(smol, 64, 16, layout, torch.bfloat16, "cpu") for layout in LAYOUTS}
rows = []
for layout, cache in larger.items():
    one, scattered, in_a_row = (pieces(cache, [*ids]) for ids in ([7], range(0, 64, 2), range(8, 40)))
    rows.append((layout, len(one), one[0][1], len(scattered), len(in_a_row)))
    assert sum(size for _, size in one) == 368_640
show.table("pieces of memory", ("layout", "one block", "bytes each", "32 scattered", "32 in a row"), rows)
assert rows == [
    ("kv_first", 60, 6144, 1920, 60),
    ("blocks_first", 30, 12_288, 960, 30),
    ("cross_layer", 1, 368_640, 32, 1),
]

# %% [markdown]
# ## The drawing's numbers
# 48 layers, block ids up to 147,455, 1.125 GiB for each layer. What does that make of a token?

# %%
NUM_BLOCKS = 147_455 + 1
assert NUM_BLOCKS == 147_456
per_block = 1.125 * 2**30 / NUM_BLOCKS
per_token = per_block / 16
elements = per_token / 2 / 2  # K and V, and 16 bits each
show.table(
    "the drawing, computed again",
    ("what", "value"),
    [
        ("bytes of a block in a layer", int(per_block)),
        ("bytes of a token in a layer", int(per_token)),
        ("elements of K of a token in a layer", int(elements)),
        ("GiB in all layers", 48 * 1.125),
        ("bytes of a block in all layers", int(48 * per_block)),
        ("tokens in the cache", NUM_BLOCKS * 16),
    ],
)
assert (per_block, per_token, elements) == (8192, 512, 128), "all whole numbers: the drawing's are consistent"
assert 48 * 1.125 == 54 and 48 * per_block == 393_216 and NUM_BLOCKS * 16 == 2_359_296

# %% [markdown]
# The real memory of that size, on torch's meta device, where nothing is allocated: one KV head of 128 in 16 bits.

# %%
drawn = model(num_layers=48, num_kv_heads=1, head_dim=128)
big = {layout: KVCache.allocate(drawn, NUM_BLOCKS, 16, layout, torch.bfloat16, "meta") for layout in LAYOUTS}
for cache in big.values():
    assert cache.memory.nbytes == 54 * 2**30
first_layer = big["kv_first"].memory[0]
assert first_layer.shape == (2, NUM_BLOCKS, 16, 1, 128) and first_layer.nbytes == 1.125 * 2**30
assert big["blocks_first"].memory[0].shape == (NUM_BLOCKS, 2, 16, 1, 128)
assert big["cross_layer"].memory.shape == (NUM_BLOCKS, 48, 2, 16, 1, 128)

# %% [markdown]
# Is a block of a layer one run of memory, as drawn? In `blocks_first` yes. In `kv_first` its keys and its values lie
# half a layer apart.


# %%
def between_k_and_v(cache: KVCache) -> int:
    (keys, values), size = cache.layers[0], cache.memory.itemsize
    return (values.storage_offset() - keys.storage_offset()) * size


assert between_k_and_v(big["blocks_first"]) == 4096 and big["blocks_first"].layers[0][0].stride(0) * 2 == 8192
assert between_k_and_v(big["kv_first"]) == 603_979_776 == NUM_BLOCKS * 4096

# %% [markdown]
# ## 576 blocks for 8k tokens?
# The real scheduler, eight prompts of 8,192 tokens, blocks of 16.

# %%
scheduler = drive.scheduler(NUM_BLOCKS // 16, 16, max_model_len=20_000, max_num_batched_tokens=8 * 8192)
for i in range(8):
    scheduler.add_request(drive.request(f"r{i}", [1000 * i + j for j in range(8192)]))
drive.step(scheduler)
assert all(len(scheduler.kv.tables[f"r{i}"]) == 512 for i in range(8))
drive.step(scheduler)
assert all(len(scheduler.kv.tables[f"r{i}"]) == 513 for i in range(8)), "the first token of output needs the 513th"

# %% [markdown]
# 512, not 576. Which block size or rounding gives 576? None does; but 576 blocks are 9,216 tokens, and the pool of the
# drawing is 576 blocks 256 times over.

# %%
assert not [size for size in range(1, 8193) if -(-8192 // size) == 576 or -(-8000 // size) == 576]
assert -(-8000 // 16) == 500
assert 576 * 16 == 9216 == 8192 + 1024 and 576 - 512 == 64
assert NUM_BLOCKS == 576 * 256, "without a remainder"
assert (576 * 8, 512 * 8) == (4608, 4096)

# %% [markdown]
# ## Where 32 bits end
# A kernel finds a block at `block * stride`. In which layout does that still fit into a signed 32-bit number for the
# drawing's last block? nanopd's kernels compute in 64 bits.

# %%
limits = {layout: -(-(2**31) // cache.layers[0][0].stride(0)) for layout, cache in big.items()}
show.table("too far for 32 bits", ("layout", "from block id"), [*limits.items()])
assert limits["blocks_first"] == 524_288 > NUM_BLOCKS, "a layer by itself is small enough"
assert limits["cross_layer"] == 10_923 < NUM_BLOCKS, "all layers together are not"

# %% [markdown]
# ## Check yourself
# The questions of the text.

# %%
assert [slot_of([9, 4, 11], p) for p in (31, 32)] == [79, 176]
assert 30 * 2 * 3 * 64 * 2 * 16 == 368_640 and 2**30 // 368_640 == 2912 and 2912 * 16 == 46_592
two_neighbours = {layout: len(pieces(cache, [7, 8])) for layout, cache in larger.items()}
assert two_neighbours == {"kv_first": 60, "blocks_first": 30, "cross_layer": 1}
store = torch.zeros(4, 16)
store[-1 // 16, -1 % 16] = 1.0
assert store[3, 15] == 1.0, "slot -1, taken as an index, is the last slot of the last block"
directory.cleanup()
