# %% [markdown]
# # 03 Block pool, free queue, prefix hashing
# The real `BlockPool`, `KVCacheManager` and `Scheduler`, no model. Blocks hold 2 tokens, as in the drawing.

# %%
from nanopd.core.block_pool import BlockPool
from nanopd.core.kv_cache import HASH_SEED, KVCacheManager, hash_block
from nanopd_lessons import drive, show

# %% [markdown]
# ## A pool of numbers
# Five blocks, all free. Two are popped, from the head. One of them is freed: it goes to the end.

# %%
pool = BlockPool(5)


def free_queue(pool: BlockPool) -> list[int]:
    return [block.block_id for block in pool.free_queue.in_order()]


assert free_queue(pool) == [0, 1, 2, 3, 4]
first, second = pool.get_new_blocks(2)
assert [first.ref_cnt, second.ref_cnt] == [1, 1]
pool.free([first])
assert free_queue(pool) == [2, 3, 4, 0]

# %% [markdown]
# ## Free does not mean empty
# We write a hash onto block 0, free or not, and find it again. It is forgotten when it is popped, not when it is freed (K5).

# %%
pool.cache(first, b"what is in it")
assert first.ref_cnt == 0 and pool.get_cached_block(b"what is in it") is first
pool.get_new_blocks(3)
assert pool.get_cached_block(b"what is in it") is first, "three others were popped"
pool.get_new_blocks(1)
assert pool.get_cached_block(b"what is in it") is None, "now it was popped itself: evicted"

# %% [markdown]
# ## Found by what it holds
# The hash of a block is over its tokens and the hash of the block before it (K2).

# %%
request = drive.request("A", [10, 11, 12, 13, 14, 15, 16, 17])
kv = KVCacheManager(num_blocks=10, block_size=2)
kv.update_block_hashes(request)
parent = HASH_SEED
for i, block_hash in enumerate(request.block_hashes):
    parent = hash_block(parent, request.token_ids[2 * i : 2 * i + 2].tobytes())
    assert parent == block_hash
show.table(
    "the chain",
    ("block", "tokens", "hash"),
    [(i, f"{10 + 2 * i} {11 + 2 * i}", h.hex()[:12]) for i, h in enumerate(request.block_hashes)],
)
assert len(request.block_hashes) == 4

# %% [markdown]
# Change the first token, and *every* hash changes. Change the last, and only the last does.

# %%
for changed, differ in ((0, 4), (7, 1)):
    tokens = request.token_ids.tolist()
    tokens[changed] = 99
    other = drive.request("B", tokens)
    kv.update_block_hashes(other)
    assert sum(a != b for a, b in zip(request.block_hashes, other.block_hashes)) == differ

# %% [markdown]
# Only full blocks have a hash: with 7 tokens there are 3.

# %%
seven = drive.request("C", request.token_ids[:7].tolist())
kv.update_block_hashes(seven)
assert seven.block_hashes == request.block_hashes[:3]

# %% [markdown]
# ## The drawing, re-enacted
# A scheduler with 10 blocks of 2 tokens. The free queue is brought into the order in which the request gets
# B3, B7, B8, B9, as drawn.


# %%
def preempted(table: list[int]):
    """A scheduler whose only request had this table and has just lost it."""
    scheduler = drive.scheduler(num_blocks=10, block_size=2)
    pool = scheduler.kv.pool
    everything = pool.get_new_blocks(10)
    pool.free(everything[i] for i in [*table, *(i for i in range(10) if i not in table)])
    request = drive.request("A", [10, 11, 12, 13, 14, 15, 16, 17])
    scheduler.add_request(request)
    plan = scheduler.schedule()
    assert plan.num_scheduled_tokens == {"A": 8} and scheduler.kv.get_block_ids("A") == table
    held = {block.block_hash: block.block_id for block in scheduler.kv.tables["A"]}
    assert held == dict(zip(request.block_hashes, table))
    show.blocks(scheduler.kv, "before the preemption")
    scheduler.running.remove(request)
    scheduler._preempt(request)
    show.blocks(scheduler.kv, "after it: last block first")
    return scheduler, request


scheduler, request = preempted([3, 7, 8, 9])
assert free_queue(scheduler.kv.pool)[-4:] == [9, 8, 7, 3], "K6: the end of the sequence is reused before its beginning"

# %% [markdown]
# Now others need blocks: first the six that were free all along, then one after the other of ours.
# What would the request find?

# %%
rows = []
pool = scheduler.kv.pool
pool.get_new_blocks(6)
for popped in range(5):
    hits = [block.block_id for block in scheduler.kv.get_computed_blocks(request)]
    there = [block.block_id for h in request.block_hashes if (block := pool.get_cached_block(h))]
    rows.append((popped, " ".join(f"B{i}" for i in there) or "none", " ".join(f"B{i}" for i in hits) or "nothing"))
    assert hits == [[3, 7, 8], [3, 7, 8], [3, 7], [3], []][popped]
    if popped < 4:
        pool.get_new_blocks(1)
show.table("what comes back", ("popped", "still in the table", "found"), rows)
assert not any(found == "B7" for _, _, found in rows), "B7 alone is never found"

# %% [markdown]
# In the first row B9 is in the table and not among the hits: one token is always left to compute.
#
# For the drawing to be right, B7 must hold h0.

# %%
scheduler, request = preempted([7, 8, 9, 3])
pool = scheduler.kv.pool
assert free_queue(pool)[-4:] == [3, 9, 8, 7]
others = pool.get_new_blocks(9)
pool.free(reversed(others))
assert [block.block_id for block in scheduler.kv.get_computed_blocks(request)] == [7]
plan = scheduler.schedule()
show.plan(plan, "it comes back")
assert scheduler.kv.get_block_ids("A")[0] == 7 and plan.num_scheduled_tokens == {"A": 6}, (
    "two tokens are saved, six computed"
)

# %% [markdown]
# ## Hits are taken before new blocks are popped (K4)
# The hit stands at the very head of the queue. Popped first, it would be evicted by the allocation that wants it.

# %%
kv = KVCacheManager(num_blocks=3, block_size=2)
a = drive.request("A", [10, 11, 12])
kv.update_block_hashes(a)
assert kv.allocate_slots(a, 0, 3) is not None
kv.free("A")
kv.pool.get_new_blocks(1)  # B2: now B1 and B0 are left, and B0 holds h0
kv.pool.free([kv.pool.blocks[2]])
kv.pool.touch([kv.pool.blocks[1]])
kv.pool.free([kv.pool.blocks[1]])
assert free_queue(kv.pool) == [0, 2, 1], "the block with h0 is next to be popped"
hits = kv.get_computed_blocks(a)
assert [block.block_id for block in hits] == [0]
got = kv.allocate_slots(a, 2, 1, hits)
assert [block.block_id for block in got or []] == [0, 2], "the hit first, then a new one from what is left"

# %% [markdown]
# ## Twins (K7)
# Two requests with the same prompt of two blocks. The second finds the first block. The last it computes itself.

# %%
scheduler = drive.scheduler(num_blocks=8, block_size=2)
kv = scheduler.kv
for name in ("one", "two"):
    scheduler.add_request(drive.request(name, [1, 2, 3, 4]))
plan = drive.step(scheduler)
show.blocks(kv, "two requests, the same four tokens")
one, two = scheduler.requests["one"], scheduler.requests["two"]
assert one.block_hashes == two.block_hashes and plan.num_scheduled_tokens == {"one": 4, "two": 2}
assert (kv.get_block_ids("one"), kv.get_block_ids("two")) == ([0, 1], [0, 2]), "the first is shared, the last is not"
assert kv.pool.get_cached_block(one.block_hashes[1]) is kv.tables["one"][1]
assert kv.tables["two"][1].block_hash is None, "the twin stays out"
assert plan.scheduled_new_reqs[1].block_ids == [0, 2], "the worker was told of the twin"
drive.step(scheduler)
assert kv.get_block_ids("two")[:2] == [0, 2], "a table only grows"

# %% [markdown]
# ## Check yourself
# The three questions of the text.

# %%
kv = KVCacheManager(num_blocks=10, block_size=16)
for num_tokens, computed in ((33, 1), (32, 16)):
    r = drive.request(f"r{num_tokens}", num_tokens)
    kv.update_block_hashes(r)
    kv.allocate_slots(r, 0, num_tokens)
    kv.free(r.request_id)
    assert num_tokens - 16 * len(kv.get_computed_blocks(r)) == computed

kv = KVCacheManager(num_blocks=10, block_size=2)
a, b = drive.request("A", [1, 2, 3, 4, 5, 6]), drive.request("B", [1, 2, 3, 4, 7, 8])
for r in (a, b):
    kv.update_block_hashes(r)
    hits = kv.get_computed_blocks(r)
    kv.allocate_slots(r, 2 * len(hits), 6 - 2 * len(hits), hits)
assert [block.ref_cnt for block in kv.tables["A"]] == [2, 2, 1]
kv.free("B")
assert [block.ref_cnt for block in kv.tables["A"]] == [1, 1, 1] and free_queue(kv.pool)[-1] == 3, (
    "only B's own block is free"
)

kv = KVCacheManager(num_blocks=5, block_size=2)
c = drive.request("C", [1, 2, 3, 4, 5, 6, 7])
kv.update_block_hashes(c)
kv.allocate_slots(c, 0, 4)
kv.free("C")
kv.pool.get_new_blocks(2)  # others hold two; three are free, two of them hits
hits = kv.get_computed_blocks(c)
assert len(hits) == 2 and kv.pool.num_free_blocks == 3
assert kv.allocate_slots(c, 4, 3, hits) is None, "two new blocks are needed, and only one is left beside the hits"
