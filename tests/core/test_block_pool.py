"""Rules K4-K7 on the pool itself, and the seed's walk-through of blocks 3, 7, 8, 9."""

import pytest

from nanopd.core.block_pool import BlockPool
from tests.core.drive import Driver, make_request, make_scheduler


def ids(pool: BlockPool) -> list[int]:
    return [block.block_id for block in pool.free_queue.in_order()]


def test_free_queue_keeps_order_when_a_block_leaves_its_middle():
    pool = BlockPool(5)
    pool.touch([pool.blocks[2]])
    assert ids(pool) == [0, 1, 3, 4]
    assert [b.block_id for b in pool.get_new_blocks(2)] == [0, 1]
    pool.free([pool.blocks[2]])
    assert ids(pool) == [3, 4, 2]
    assert pool.num_free_blocks == 3


def test_free_queue_can_be_emptied_and_filled_again():
    pool = BlockPool(3)
    blocks = pool.get_new_blocks(3)
    assert ids(pool) == []
    pool.free(reversed(blocks))
    assert ids(pool) == [2, 1, 0]


def test_popping_more_than_there_is_fails_loudly():
    with pytest.raises(AssertionError, match="4 blocks wanted, 3 free"):
        BlockPool(3).get_new_blocks(4)


def test_k5_a_popped_block_is_evicted():
    pool = BlockPool(2)
    (block,) = pool.get_new_blocks(1)
    pool.cache(block, b"h")
    pool.free([block])
    assert pool.get_cached_block(b"h") is block, "a free block can still be found"
    pool.get_new_blocks(2)
    assert pool.get_cached_block(b"h") is None


def test_k7_the_first_block_with_a_hash_stays():
    pool = BlockPool(2)
    first, twin = pool.get_new_blocks(2)
    pool.cache(first, b"h")
    pool.cache(twin, b"h")
    assert pool.get_cached_block(b"h") is first
    assert twin.block_hash is None


def test_k6_the_drawing_of_blocks_3_7_8_9():
    """The seed: a request with 4 full blocks of 2 tokens loses blocks 3, 7, 8, 9 to a preemption and comes back.

    The drawing finds one block, B7, in the hash table. A hit is a prefix of the hash chain, so that block must hold h0:
    B7 is the request's *first* block. Freed last block first, it stands at the end of the queue and is evicted last.
    """
    scheduler = make_scheduler(num_blocks=10, block_size=2)
    driver, pool = Driver(scheduler), scheduler.kv.pool
    # Bring the free queue into an order in which the request gets 7, 8, 9, 3.
    everything = pool.get_new_blocks(10)
    pool.free(everything[i] for i in (7, 8, 9, 3, 0, 1, 2, 4, 5, 6))
    a = make_request("a", prompt=8, max_tokens=4)
    scheduler.add_request(a)
    driver.step()
    assert scheduler.kv.get_block_ids("a") == [7, 8, 9, 3]
    h0, h1, h2, h3 = a.block_hashes[:4]

    scheduler.running.remove(a)
    scheduler._preempt(a)
    driver.tables.clear()  # as the worker would, when told of the preemption
    assert ids(pool)[-4:] == [3, 9, 8, 7], "last block first: the beginning of the sequence is reused last"
    assert {h: pool.get_cached_block(h).block_id for h in (h0, h1, h2, h3)} == {h0: 7, h1: 8, h2: 9, h3: 3}

    # Somebody else needs all but the last free block: B3, B9 and B8 are evicted, and only B7 is still known.
    other = pool.get_new_blocks(9)
    pool.free(reversed(other))
    assert [pool.get_cached_block(h) is not None for h in (h0, h1, h2, h3)] == [True, False, False, False]
    hits = scheduler.kv.get_computed_blocks(a)
    assert [block.block_id for block in hits] == [7]
    driver.step()
    assert scheduler.kv.get_block_ids("a")[0] == 7
    assert a.num_computed_tokens == a.num_tokens - 1, "B7's two tokens were not computed again, the rest was"


def test_a_hit_is_a_prefix_of_the_chain():
    """The loose end of the drawing: were only h1's block left, nothing would be found, though the block is there."""
    scheduler = make_scheduler(num_blocks=10, block_size=2)
    driver, pool = Driver(scheduler), scheduler.kv.pool
    a = make_request("a", prompt=8)
    scheduler.add_request(a)
    driver.step()
    pool.evict(scheduler.kv.tables["a"][0])
    assert pool.get_cached_block(a.block_hashes[1]) is not None
    assert scheduler.kv.get_computed_blocks(a) == []
