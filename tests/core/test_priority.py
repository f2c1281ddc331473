"""S3 and S4 with priorities: who goes first, who is thrown out, what a victim gives back, and that nobody starves."""

import random
from typing import Any

import pytest

from nanopd.core.output import KVConnectorOutput
from nanopd.request import Request
from tests.core.drive import Driver, FakeConnector, make_request, make_scheduler


def ask(name: str, priority: int, at: float, prompt: int | list[int] = 8, max_tokens: int = 4) -> Request:
    """A request that arrived at a time of ours."""
    request = make_request(name, prompt, max_tokens)
    request.priority, request.metrics.arrival_time = priority, at
    return request


def start(*requests: Request, **options: Any) -> Driver:
    scheduler = make_scheduler(scheduling_policy="priority", **options)
    for request in requests:
        scheduler.add_request(request)
    return Driver(scheduler)


def names(requests: Any) -> str:
    return "".join(r.request_id for r in requests)


def test_s4_waiting_is_ordered_by_priority_and_then_by_arrival():
    driver = start(ask("a", 0, 1), ask("b", 5, 2), ask("c", -1, 3), ask("d", 0, 4), max_num_seqs=1)
    assert names(driver.scheduler.waiting) == "cadb"
    driver.run()
    assert list(driver.outputs) == ["c", "a", "d", "b"]


def test_without_the_policy_priorities_mean_nothing():
    scheduler = make_scheduler()
    for request in (ask("a", 0, 1), ask("b", -5, 2)):
        scheduler.add_request(request)
    assert names(scheduler.waiting) == "ab"


def full(*priorities: int) -> Driver:
    """a, b and c hold 2 of 6 blocks each, run in this order, and all want a third one in the next step."""
    driver = start(num_blocks=6, block_size=4, max_num_seqs=3)
    for at, (name, priority) in enumerate(zip("abc", priorities)):
        driver.scheduler.add_request(ask(name, priority, at, max_tokens=3))
    return driver


@pytest.mark.parametrize(
    ("priorities", "running", "scheduled", "case"),
    [
        ((0, 1, 2), "abc", "ab", "S3 case A"),  # c has no tokens yet when a wants its block
        ((2, 1, 0), "cba", "cb", "S3 case A"),
        ((0, 0, 0), "abc", "ab", "S3 case A"),
    ],
)
def test_s3_the_victim_ranks_last(priorities: tuple[int, ...], running: str, scheduled: str, case: str):
    driver, told = full(*priorities), []
    driver.step()
    assert names(driver.scheduler.running) == running
    driver.scheduler.trace = told.append
    output = driver.step()
    assert "".join(output.num_scheduled_tokens) == scheduled
    assert [event.rule for event in told if getattr(event, "status", "") == "preempted"] == [case]


def urgent_last() -> Driver:
    """a runs, then b and c come, each more urgent than the one before: `running` is a b c, and a ranks last."""
    driver = start(num_blocks=6, block_size=4)
    for at, (name, prompt) in enumerate({"a": 2, "b": 6, "c": 7}.items()):
        driver.scheduler.add_request(ask(name, -at, at, prompt, max_tokens=6))
        driver.step()
    assert names(driver.scheduler.running) == "abc"
    return driver


def test_s3_case_c_a_victim_gives_its_tokens_back():
    driver, told = urgent_last(), []
    driver.scheduler.trace = driver.scheduler.kv.trace = told.append
    while not (output := driver.step()).preempted_req_ids:
        pass
    (moved,) = [event for event in told if getattr(event, "status", "") == "preempted"]
    assert (moved.request_id, moved.rule) == ("a", "S3 case C")
    assert output.preempted_req_ids == {"a"}
    assert "a" not in output.num_scheduled_tokens
    assert "a" not in [r.request_id for r in output.scheduled_cached_reqs]
    assert output.total_num_scheduled_tokens == sum(output.num_scheduled_tokens.values())
    assert list(output.num_scheduled_tokens) == ["b", "c"], "nobody is skipped because the list got shorter"
    driver.run()
    assert {len(tokens) for tokens in driver.outputs.values()} == {6}


def test_s3_case_c_the_blocks_it_was_to_fill_are_not_found():
    """a is to fill two blocks in the step in which b takes one of them away."""
    driver = start(num_blocks=14, block_size=2, long_prefill_token_threshold=8)
    scheduler = driver.scheduler
    scheduler.add_request(a := ask("a", 1, 0, prompt=20))
    driver.step()
    scheduler.add_request(ask("b", 0, 1, prompt=8))
    driver.step()
    assert a.num_computed_tokens == 16
    assert scheduler.schedule().preempted_req_ids == {"a"}
    found = [scheduler.kv.pool.get_cached_block(block_hash) is not None for block_hash in a.block_hashes]
    assert found == [True] * 8 + [False] * 2


def test_s3_case_b_goes_on_with_those_who_rank_before():
    """a, the first of `running`, ranks last and wants a block that is not there; b still has its turn."""
    driver, told = start(ask("a", 1, 0, prompt=8, max_tokens=8), num_blocks=5, block_size=4), []
    driver.step()
    driver.scheduler.add_request(ask("b", 0, 1, prompt=5, max_tokens=8))
    driver.scheduler.trace = told.append
    while not (output := driver.step()).preempted_req_ids:
        pass
    (moved,) = [event for event in told if getattr(event, "status", "") == "preempted"]
    assert (moved.request_id, moved.rule) == ("a", "S3 case B")
    assert output.num_scheduled_tokens == {"b": 1}


def test_nobody_starves():
    """One seat. Those of priority 0 that come each second overtake a request of priority 3 for 30 seconds, no longer."""
    driver = start(ask("low", 3, 0.5, max_tokens=1), max_num_seqs=1, priority_seconds=10.0)
    overtaken = 0
    for at in range(1, 60):
        driver.scheduler.add_request(ask(f"u{at}", 0, at, max_tokens=1))
        driver.step()
        if "low" in driver.outputs:
            break
        overtaken += 1
    assert overtaken == 30


def test_random_lives_in_tight_pools_come_to_all_three_cases():
    """Whoever is thrown out at whatever moment, everyone reads what was written for it, and ends (see Driver.execute)."""
    cases: set[str] = set()
    for seed in range(150):
        rng, told = random.Random(seed), []
        options = {"block_size": rng.choice((2, 4)), "long_prefill_token_threshold": rng.choice((0, 5))}
        drafts = {"speculative_ngram": rng.choice((0, 3)), "priority_seconds": rng.choice((0.5, 100.0))}
        driver = start(num_blocks=rng.randint(8, 14), **options, **drafts)
        driver.scheduler.trace = told.append
        for at in range(30):
            if rng.random() < 0.4:
                prompt = [rng.choice((0, 1, 3)) for _ in range(rng.randint(1, 12))]
                driver.scheduler.add_request(ask(f"r{at}", rng.randint(-2, 2), at, prompt, rng.randint(1, 8)))
            driver.right = rng.randrange(5)
            driver.step({i: rng.choice((0, 1, 3)) for i in driver.scheduler.requests})
        driver.run()
        cases |= {event.rule for event in told if getattr(event, "status", "") == "preempted"}
    assert cases == {"S3 case A", "S3 case B", "S3 case C"}


def test_s10_a_loaded_request_does_not_starve_one_that_goes_before_it():
    """The loaded one holds 7 of 17 blocks and ranks last; the other needs 11, gets 10 and preempts itself: for ever?"""
    connector = FakeConnector(block_size=1)
    scheduler = make_scheduler(
        17, 1, False, connector=connector, scheduling_policy="priority", long_prefill_token_threshold=3, max_num_seqs=1
    )
    driver = Driver(scheduler)
    connector.remote["loaded"] = 7
    scheduler.add_request(ask("loaded", 2, 0, prompt=7))
    driver.step()
    scheduler.add_request(ask("urgent", 0, 1, prompt=11))
    driver.transfers = KVConnectorOutput(finished_recving={"loaded"})
    driver.run()
    assert driver.reasons == {"loaded": "length", "urgent": "length"}
    assert list(driver.outputs) == ["urgent", "loaded"]
