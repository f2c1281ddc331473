# %% [markdown]
# # 12 Inside batch_transfer_sync_write
# Two real Transfer Engines over TCP, and a model of what happens inside with RDMA cards.
# Both write into the same kind of memory.

# %%
import ctypes

import numpy as np
import torch
from fabric import (
    FRAGMENT_LIMIT,
    MAX_RETRIES,
    MAX_WR,
    NUM_SHARDS,
    POLL_COUNT,
    QPS_PER_ENDPOINT,
    SLICE_SIZE,
    Request,
    Segment,
)
from solution import Engine

from nanopd.config import KVTransferConfig, UserError
from nanopd.connector.protocol import Layout
from nanopd.connector.transport import MooncakeTransport, TransferError, pieces_of
from nanopd.models.config import ModelConfig
from nanopd.worker.kv_memory import KVCache
from nanopd_lessons import show

# %% [markdown]
# ## A batch becomes slices
# First the numbers of the text: how a request is cut.

# %%
anywhere = Segment([(0, 2**48)], num_nics=1)


def sizes(num_bytes: int) -> list[int]:
    return [one.num_bytes for one in Engine(anywhere).cut(Request(0, 0, num_bytes))]


assert (SLICE_SIZE, FRAGMENT_LIMIT) == (65_536, 16_384)
show.table(
    "slices",
    ("bytes", "slices", "of"),
    [(n, len(sizes(n)), " ".join(map(str, sizes(n)))) for n in (6_144, 81_920, 81_921, 147_457)],
)
assert sizes(81_920) == [81_920], "a rest of 16,384 bytes is taken along"
assert sizes(81_921) == [65_536, 16_385], "one byte more is not"
assert sizes(147_457) == [65_536, 65_536, 16_385]

# %% [markdown]
# Now KV blocks of the default model's shape: 30 layers, 3 KV heads of 64, bfloat16, 16 tokens a block.

# %%
config = ModelConfig.from_hf(
    {"architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    | {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 300, "max_position_embeddings": 512}
)
NUM_BLOCKS = 40


def kv_memory(name: str) -> tuple[KVCache, Layout]:
    """A cache as an engine would have it, and what it would tell a peer about it."""
    cache = KVCache.allocate(config, NUM_BLOCKS, 16, name, torch.bfloat16, "cpu")
    shape, dim = cache.memory.shape, {"kv_first": 2, "blocks_first": 1, "cross_layer": 0}[name]
    run_bytes = shape[dim + 1 :].numel() * cache.memory.itemsize
    return cache, Layout("model", "bfloat16", name, 16, shape[:dim].numel(), run_bytes, shape[dim])


rows = []
for name in ("kv_first", "blocks_first", "cross_layer"):
    cache, layout = kv_memory(name)
    pieces = pieces_of(layout, 0, [7], layout, 0, [7])
    num_slices = sum(len(sizes(piece.num_bytes)) for piece in pieces)
    rows.append((name, len(pieces), pieces[0].num_bytes, num_slices))
show.table("one block", ("layout", "requests", "bytes each", "slices"), rows)
assert rows == [("kv_first", 60, 6_144, 60), ("blocks_first", 30, 12_288, 30), ("cross_layer", 1, 368_640, 6)]

# %% [markdown]
# ## Slices wait in shards
# A peer with eight cards: each card's slices go into a shard of their own, so those who post for different cards never meet.

# %%
eight = Engine(Segment([(0, 2**48)], num_nics=8))
eight.submit([Request(0, 0, 16 * SLICE_SIZE)])
assert NUM_SHARDS == 8 and [len(shard) for shard in eight.shards] == [2] * 8
assert all(one.nic == i for i, shard in enumerate(eight.shards) for one in shard)

# %% [markdown]
# ## Posting
# 1,000 slices for one card. Its two queue pairs take 256 each; the rest waits.


# %%
def memory(num_bytes: int, num_nics: int) -> tuple[np.ndarray, np.ndarray, Engine]:
    """Ours, full of numbers; the peer's, empty; and an engine that can write there."""
    ours, theirs = np.random.default_rng(0).integers(1, 256, num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    return ours, theirs, Engine(Segment([(theirs.ctypes.data, num_bytes)], num_nics))


def requests(ours: np.ndarray, theirs: np.ndarray, size: int) -> list[Request]:
    return [Request(ours.ctypes.data + i, theirs.ctypes.data + i, size) for i in range(0, len(ours), size)]


ours, theirs, engine = memory(1000, num_nics=1)
engine.submit(batch := requests(ours, theirs, 1))
engine.post()
(endpoint,) = engine.endpoints
assert (QPS_PER_ENDPOINT, MAX_WR) == (2, 256)
assert [pair.depth for pair in endpoint.queue_pairs] == [256, 256] and len(engine.shards[0]) == 488
engine.post()
assert len(engine.shards[0]) == 488, "full is full"

# %% [markdown]
# ## Polling
# The card works: bytes have arrived, but nobody knows. Only when the completions are taken do the counts change.

# %%
endpoint.work(50)
assert (theirs != 0).sum() == 100 and sum(request.num_succeeded for request in batch) == 0
engine.poll()
assert POLL_COUNT == 64 and sum(request.num_succeeded for request in batch) == 64, "64 of the 100 completions"
assert sum(pair.depth for pair in endpoint.queue_pairs) == 512 - 64
engine.post()
assert len(engine.shards[0]) == 488 - 64, "what has ended makes room"

# %% [markdown]
# Turn by turn, until the counts add up.

# %%
turns = 0
while any(request.status == "WAITING" for request in batch):
    engine.post()
    endpoint.work(50)
    engine.poll()
    turns += 1
show.say(f"  all 1,000 after {turns} more turns")
assert (ours == theirs).all() and {request.status for request in batch} == {"COMPLETED"}

# %% [markdown]
# ## When a card fails
# Four cards, one of them dead. Its slices go to the next one; the batch does not notice.

# %%
ours, theirs, engine = memory(4_000_000, num_nics=4)
engine.endpoints[2].up = False
batch = requests(ours, theirs, 100_000)
assert engine.transfer_sync(batch) == 0 and (ours == theirs).all()
show.table(
    "bytes over each card", ("card", "bytes"), [(endpoint.nic, endpoint.num_written) for endpoint in engine.endpoints]
)
assert engine.endpoints[2].num_written == 0 and engine.endpoints[3].num_written > engine.endpoints[0].num_written, (
    "the next one does its work"
)

# %% [markdown]
# All of them dead after some work: every slice is tried 1 + 9 times, then the batch ends, and it has failed.
# What was written is written.

# %%
ours, theirs, engine = memory(4_000_000, num_nics=4)
engine.submit(batch := requests(ours, theirs, 100_000))
engine.post()
for endpoint in engine.endpoints:
    endpoint.work(3)
    endpoint.up = False
tries = 0
while any(request.status == "WAITING" for request in batch):
    for endpoint in engine.endpoints:
        tries += sum(len(pair.posted) for pair in endpoint.queue_pairs)
        endpoint.work(64)
    engine.poll()
    engine.post()
written = sum(endpoint.num_written for endpoint in engine.endpoints)
num_slices = sum(request.num_slices for request in batch)
lost = num_slices - sum(request.num_succeeded for request in batch)
assert MAX_RETRIES == 9 and tries == 10 * lost
assert {request.status for request in batch} == {"COMPLETED", "FAILED"} and 0 < written < 4_000_000
assert (theirs != 0).sum() == written, "a failed batch has changed the peer's memory"
show.say(f"  {written:,} of 4,000,000 bytes were written before it failed")

# %% [markdown]
# ## The same batches through real Mooncake
# Two Transfer Engines in this process, over TCP. P's memory is full of numbers, D's is empty. The blocks of a prompt lie
# scattered, as they do after some work; `pieces_of` merges what are neighbours on both sides.

# %%
p_cache, layout = kv_memory("cross_layer")
d_cache, _ = kv_memory("cross_layer")
model_cache, _ = kv_memory("cross_layer")
p_bytes = np.ctypeslib.as_array((ctypes.c_uint8 * p_cache.memory.nbytes).from_address(p_cache.memory.data_ptr()))
p_bytes[:] = np.random.default_rng(1).integers(0, 256, len(p_bytes), np.uint8)
d_cache.memory.zero_()
model_cache.memory.zero_()
here, there = [3, 4, 5, 9, 20, 21], [0, 1, 2, 3, 30, 12]


def pieces_to(cache: KVCache) -> list:
    return pieces_of(layout, p_cache.memory.data_ptr(), here, layout, cache.memory.data_ptr(), there)


assert [piece.num_bytes // 368_640 for piece in pieces_to(d_cache)] == [3, 1, 1, 1], (
    "3, 4, 5 are neighbours on both sides"
)
model = Engine(Segment([(model_cache.memory.data_ptr(), model_cache.memory.nbytes)], num_nics=2))
assert model.transfer_sync([Request(*piece) for piece in pieces_to(model_cache)]) == 0

try:
    p, d = (MooncakeTransport(KVTransferConfig(), c.memory.data_ptr(), c.memory.nbytes) for c in (p_cache, d_cache))
except UserError as error:  # no Mooncake on this system
    show.say(f"  {error}\n  The rest of this lesson needs it.")
    raise SystemExit(0) from None
p.write(d.session, pieces_to(d_cache), lambda: False)
assert d_cache.memory.view(torch.int16).equal(model_cache.memory.view(torch.int16)), (
    "real Mooncake and the model wrote the same"
)
assert d_cache.memory.view(torch.int16).count_nonzero() > 0

# %% [markdown]
# ## What -1 says, and what not
# A batch with one good piece and one that lies outside of what D has registered. Both engines fail it.

# %%
d_cache.memory.zero_()
model_cache.memory.zero_()
answers = {}
for name, cache in (("Mooncake", d_cache), ("the model", model_cache)):
    first, *_ = pieces_to(cache)
    end = cache.memory.data_ptr() + cache.memory.nbytes
    columns = [first.source, first.source], [first.target, end - 100], [first.num_bytes, 368_640]
    if name == "Mooncake":
        answers[name] = p._engine.batch_transfer_sync_write(d.session, *map(list, columns))
    else:
        answers[name] = model.transfer_sync([Request(*one) for one in zip(*columns)])
assert answers == {"Mooncake": -1, "the model": -1}

# %% [markdown]
# Was the good piece written? In the model it was. And by Mooncake, over TCP:

# %%
block_numbers = 368_640 // 2
for name, cache in (("the model", model_cache), ("Mooncake", d_cache)):
    target = cache.memory.view(torch.int16).reshape(NUM_BLOCKS, -1)[0:3]
    wanted = p_cache.memory.view(torch.int16).reshape(NUM_BLOCKS, -1)[3:6]
    show.say(
        f"  {name}: {int((target == wanted).sum()):,} of {3 * block_numbers:,} numbers of the good piece are there"
    )
assert (
    model_cache.memory.view(torch.int16)
    .reshape(NUM_BLOCKS, -1)[0:3]
    .equal(p_cache.memory.view(torch.int16).reshape(NUM_BLOCKS, -1)[3:6])
)

# %% [markdown]
# A peer that is not there; nanopd's transport tries, pauses, tries again, and then fails this one transfer.

# %%
assert (
    p._engine.batch_transfer_sync_write(
        "127.0.0.1:1", [pieces_to(d_cache)[0].source], [pieces_to(d_cache)[0].target], [16]
    )
    == -1
)
try:
    p.write("127.0.0.1:1", pieces_to(d_cache), lambda: False)
except TransferError as error:
    show.say(f"  {error}")
else:
    raise AssertionError("a transfer to nobody succeeded")
p.write(d.session, pieces_to(d_cache), lambda: False)
assert d_cache.memory.view(torch.int16)[there].equal(p_cache.memory.view(torch.int16)[here]), (
    "and it is fine afterwards"
)

# %% [markdown]
# Too many requests at once: more than some 2,000 are refused. So nanopd never sends more than 512 in a batch.

# %%
first = pieces_to(d_cache)[0]
many = [[first.source] * 5_000, [first.target] * 5_000, [16] * 5_000]
assert p._engine.batch_transfer_sync_write(d.session, *many) == -1 and MooncakeTransport.MAX_PIECES == 512

# %% [markdown]
# ## Check yourself
# The questions of the text: slices of 147,457 bytes and the 488 that wait are above; the third is the good piece of a
# failed batch.
