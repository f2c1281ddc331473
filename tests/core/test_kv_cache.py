"""Rules K2-K4 and K8: hashing, hits, allocation."""

import pytest

from nanopd.core.kv_cache import HASH_SEED, KVCacheManager, hash_block
from tests.core.drive import Driver, make_request, make_scheduler


def test_k2_only_full_blocks_are_hashed_each_over_all_before_it():
    kv = KVCacheManager(8, block_size=4)
    a, b = make_request("a", list(range(11))), make_request("b", [*range(4), 99, 5, 6, 7])
    kv.update_block_hashes(a)
    kv.update_block_hashes(b)
    assert len(a.block_hashes) == 2
    assert a.block_hashes[0] == b.block_hashes[0]
    assert a.block_hashes[1] != b.block_hashes[1]
    shifted = make_request("c", [*range(50, 54), *range(4, 8)])
    kv.update_block_hashes(shifted)
    assert shifted.block_hashes[1] != a.block_hashes[1], "same tokens in block 1, but another beginning"


def test_k2_the_salt_keeps_tenants_apart_from_the_first_block_on():
    kv = KVCacheManager(8, block_size=4)
    plain, one, two = (make_request(i, list(range(8)), cache_salt=s) for i, s in (("p", None), ("x", "1"), ("y", "2")))
    for request in (plain, one, two):
        kv.update_block_hashes(request)
    assert len({r.block_hashes[i] for r in (plain, one, two) for i in (0, 1)}) == 6


def test_k2_extra_keys_cannot_run_into_each_other():
    assert hash_block(HASH_SEED, b"", ["ab", "c"]) != hash_block(HASH_SEED, b"", ["a", "bc"])
    assert hash_block(HASH_SEED, b"12345678") != hash_block(HASH_SEED, b"12345679")


def test_k3_hashes_are_computed_once(monkeypatch):
    kv, calls = KVCacheManager(8, block_size=4), []
    monkeypatch.setattr("nanopd.core.kv_cache.hash_block", lambda *a: calls.append(a) or bytes([len(calls)]) * 32)
    request = make_request("a", 6)
    kv.update_block_hashes(request)
    for token in range(7):
        request.token_ids.append(token)
        kv.update_block_hashes(request)
    assert len(calls) == 13 // 4
    assert [call[0] for call in calls] == [HASH_SEED, bytes([1]) * 32, bytes([2]) * 32]


@pytest.mark.parametrize(("prompt", "expected"), [(3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
def test_a_hit_leaves_at_least_one_token_to_compute(prompt: int, expected: int):
    scheduler = make_scheduler()
    driver = Driver(scheduler)
    scheduler.add_request(make_request("first", list(range(12)), max_tokens=1))
    driver.run()
    again = make_request("again", list(range(prompt)))
    scheduler.kv.update_block_hashes(again)
    assert len(scheduler.kv.get_computed_blocks(again)) == expected


def test_k4_new_blocks_are_never_the_hits_of_the_same_allocation():
    """vLLM pull request 37164: a lookup's blocks popped by the allocation that was to use them."""
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    driver = Driver(scheduler)
    scheduler.add_request(make_request("a", list(range(12)), max_tokens=1))
    driver.run()
    scheduler.add_request(make_request("x", 7, max_tokens=1))
    driver.run()
    free = [block.block_id for block in scheduler.kv.pool.free_queue.in_order()]
    assert free == [1, 0, 2, 3], "the blocks of a's prefix are the next to be reused"
    b = make_request("b", [*range(8), 90, 91, 92, 93, 94], max_tokens=1)  # hits two blocks, needs two more: exactly all
    scheduler.add_request(b)
    driver.step()
    assert driver.outputs["b"]
    scheduler.check_invariants()
    # The same, one block short: hits that are free must not be counted twice.
    c = make_request("c", [*range(8), *range(80, 88)], max_tokens=2)
    scheduler.kv.update_block_hashes(c)
    hits = scheduler.kv.get_computed_blocks(c)
    assert len(hits) == 2
    assert scheduler.kv.allocate_slots(c, 8, 9, hits) is None
    assert all(block.ref_cnt == 0 for block in hits), "a refused allocation changes nothing"


def test_k4_nothing_found_by_a_lookup_is_kept_across_another_allocation():
    """Two requests share a prefix; the pool is so small that the second one's hits are evicted for the first."""
    scheduler = make_scheduler(num_blocks=4, block_size=4, max_num_seqs=4)
    driver = Driver(scheduler)
    scheduler.add_request(make_request("seed", list(range(8)), max_tokens=1))
    driver.run()
    scheduler.add_request(make_request("x", list(range(100, 114)), max_tokens=1))  # takes all 4 blocks
    scheduler.add_request(make_request("y", [*range(8), 9], max_tokens=1))
    driver.run()
    assert driver.reasons == {"seed": "length", "x": "length", "y": "length"}


def test_requests_of_one_step_share_what_is_computed_in_it():
    scheduler = make_scheduler(num_blocks=64, block_size=4)
    driver = Driver(scheduler)
    for i in range(8):
        scheduler.add_request(make_request(f"r{i}", [*range(40), 100 + i]))
    output = driver.step()
    assert output.num_scheduled_tokens == {"r0": 41, **{f"r{i}": 1 for i in range(1, 8)}}
    assert output.num_common_prefix_blocks == 10


def test_no_prefix_caching_finds_nothing_and_hashes_nothing():
    scheduler = make_scheduler(prefix_caching=False)
    driver = Driver(scheduler)
    for i in range(2):
        scheduler.add_request(make_request(f"r{i}", list(range(20))))
        driver.run()
    assert scheduler.stats().prefix_cache_hits == 0
    assert not scheduler.kv.pool.cached_block_hash_to_block


def test_k10_finds_what_is_wrong():
    """The check itself can fail."""

    def fresh() -> KVCacheManager:
        scheduler = make_scheduler(num_blocks=8)
        scheduler.add_request(make_request("a", 9))
        Driver(scheduler).step()
        return scheduler.kv

    kv = fresh()
    kv.check_invariants(["a"])
    with pytest.raises(AssertionError, match="not there any more"):
        kv.check_invariants([])
    for damage in (
        lambda kv: kv.pool.touch([kv.tables["a"][0]]),
        lambda kv: kv.pool.free([kv.tables["a"][0]]),
        lambda kv: kv.tables.pop("a"),
        lambda kv: setattr(kv.tables["a"][0], "block_hash", b"other"),
        lambda kv: kv.pool.cached_block_hash_to_block.clear(),
        lambda kv: kv.pool.free_queue.append([kv.tables["a"][0]]),
    ):
        kv = fresh()
        damage(kv)
        with pytest.raises(AssertionError):
            kv.check_invariants(["a"])
