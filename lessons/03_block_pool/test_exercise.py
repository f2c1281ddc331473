"""What exercise 03 is graded by. `nanopd grade 03 FILE`, or `pytest` in this folder for exercise.py."""

from random import Random
from types import ModuleType
from typing import Any
from unittest.mock import patch

from nanopd_lessons import drive
from nanopd_lessons.grading import case, generate


def books(pool: Any) -> dict[str, Any]:
    """All that can be seen of a pool."""
    return {
        "free queue": [block.block_id for block in pool.free_queue.in_order()],
        "reference counts": [block.ref_cnt for block in pool.blocks],
        "hash table": {h.hex(): block.block_id for h, block in sorted(pool.cached_block_hash_to_block.items())},
    }


@case(points=1, hint="New blocks come from the head of the free queue, and each is now held by one table.")
def test_new_blocks(student: ModuleType, random: Random) -> Any:
    """New blocks come from the head, with reference count 1"""
    pool = student.BlockPool(n := random.randint(5, 9))
    got = [block.block_id for block in pool.get_new_blocks(random.randint(1, n - 1))]
    return {"got": got, "afterwards": books(pool)}


@case(points=2, hint="K5: think of what the hash table still says about a block that gets new contents.")
def test_popped_blocks_are_forgotten(student: ModuleType, random: Random) -> Any:
    """A popped block can no longer be found by its old contents, a free one can"""
    pool = student.BlockPool(4)
    blocks = pool.get_new_blocks(3)
    for i, block in enumerate(blocks):
        pool.cache(block, b"%d" % i)
    pool.free(reversed(blocks))
    before = books(pool)
    pool.get_new_blocks(random.randint(2, 3))
    return {"when freed": before, "when popped": books(pool)}


@case(
    points=2, hint="K4: a free block that is found again stands somewhere in the middle of the queue. Is it still free?"
)
def test_touch(student: ModuleType, random: Random) -> Any:
    """A touched block leaves the free queue, and is counted"""
    pool = student.BlockPool(6)
    block = pool.blocks[random.randint(1, 4)]
    pool.touch([block])
    once = books(pool)
    pool.touch([block])
    return {"touched once": once, "touched twice": books(pool)}


@case(
    points=2,
    hint="A block is free when *nobody* holds it. The order of the others is the order they were given in (K6).",
)
def test_free(student: ModuleType, random: Random) -> Any:
    """Freed blocks go to the end in the given order; shared ones stay held"""
    pool = student.BlockPool(7)
    blocks = pool.get_new_blocks(5)
    shared = random.sample(blocks, 2)
    pool.touch(shared)
    pool.free(reversed(blocks))
    first = books(pool)
    pool.free(shared)
    return {"the first table": first, "the second": books(pool)}


@case(points=1, hint="K7: who came first keeps the place; and a block that has a hash keeps it.")
def test_twins(student: ModuleType, random: Random) -> Any:
    """The first block with some contents stays in the hash table"""
    pool = student.BlockPool(4)
    first, twin, other = pool.get_new_blocks(3)
    pool.cache(first, b"same")
    pool.cache(twin, b"same")
    pool.cache(first, b"different")
    pool.cache(other, b"own")
    pool.free([twin, first])
    return {"afterwards": books(pool), "hashes": [block.block_hash for block in pool.blocks]}


@case(
    points=3,
    hint="Run `nanopd lesson run 03` and compare your free queue with the one shown there after the preemption.",
)
def test_walk_through(student: ModuleType, random: Random) -> Any:
    """The preempted request of the lesson finds what it should, in the real scheduler"""
    with patch("nanopd.core.kv_cache.BlockPool", student.BlockPool):
        scheduler = drive.scheduler(num_blocks=10, block_size=2)
    pool, seen = scheduler.kv.pool, {}
    table = random.sample(range(10), 4)
    everything = pool.get_new_blocks(10)
    pool.free(everything[i] for i in [*table, *(i for i in range(10) if i not in table)])
    a = drive.request("A", 8)
    scheduler.add_request(a)
    scheduler.schedule()
    seen["table"] = scheduler.kv.get_block_ids("A")
    scheduler.running.remove(a)
    scheduler._preempt(a)
    seen["after the preemption"] = books(pool)
    others = pool.get_new_blocks(6 + random.randint(1, 3))
    seen["found"] = [block.block_id for block in scheduler.kv.get_computed_blocks(a)]
    pool.free(reversed(others))
    drive.step(scheduler)
    seen["it comes back with"] = scheduler.kv.get_block_ids("A")
    return seen


@case(points=3, hint="`scheduler.check_invariants()` after each step tells which of K10's books does not balance.")
def test_under_load(student: ModuleType, random: Random) -> Any:
    """200 random steps: shared prefixes, preemptions, aborts, and the books balance after each"""
    with patch("nanopd.core.kv_cache.BlockPool", student.BlockPool):
        scheduler = drive.scheduler(num_blocks=20, block_size=4, max_num_batched_tokens=30)
    number, seen = 0, []
    for _ in range(200):
        if random.random() < 0.3:
            number += 1
            prefix = list(range(4 * random.randint(0, 4)))
            prompt = prefix + [number * 1000 + i for i in range(random.randint(1, 12))]
            scheduler.add_request(drive.request(f"r{number}", prompt, max_tokens=random.randint(1, 20)))
        if random.random() < 0.05 and scheduler.requests:
            scheduler.finish_requests([random.choice(list(scheduler.requests))])
        if scheduler.has_unfinished_requests():
            plan = drive.step(scheduler)
            seen.append([list(plan.num_scheduled_tokens.items()), scheduler.kv.pool.num_free_blocks])
    drive.run(scheduler)
    return {"plans": seen, "at the end": books(scheduler.kv.pool), "preemptions": scheduler.stats().num_preemptions}


@case(points=4, hint="All the cases above are small pieces of this one: find the first of them that fails.", seconds=60)
def test_real_engine(student: ModuleType, random: Random) -> Any:
    """Your pool serves real tokens: prefix hits, and preemptions in a pool that is too small"""
    shared = [random.randrange(10, 290) for _ in range(32)]
    prompts = [shared + [random.randrange(10, 290) for _ in range(random.randint(1, 20))] for _ in range(4)]
    with patch("nanopd.core.kv_cache.BlockPool", student.BlockPool):
        return generate(prompts, max_tokens=24, num_blocks=8, max_num_batched_tokens=64)
