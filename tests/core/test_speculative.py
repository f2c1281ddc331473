"""Drafts in the scheduler: S1, S2, K9, and what is left of them when they are wrong."""

from array import array

import pytest

from nanopd.core.ngram import propose
from nanopd.request import RequestStatus
from tests.core.drive import Driver, make_request, make_scheduler


def draft(tokens: list[int], most: int = 4) -> list[int]:
    return propose(array("q", tokens), most)


def test_a_draft_is_what_followed_the_last_time():
    assert draft([1, 2, 3, 4, 5, 6, 7, 1, 2, 3]) == [4]
    assert draft([1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4]) == [5, 6]
    assert draft([1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4], 1) == [5]
    assert draft([1, 2, 3, 4, 9, 1, 2, 3, 5, 8, 1, 2, 3]) == [5], "of places that are as much alike the latest counts"
    assert draft([0, 1, 2, 3, 4, 9, 1, 2, 3, 5, 0, 1, 2, 3]) == [4, 9], "four tokens go before a later place of three"
    assert draft([0, 1, 2, 3, 4, 9, 1, 2, 3, 5, 0, 1, 2, 3], 1) == [5], "who may guess one needs no four"


@pytest.mark.parametrize("alike", range(1, 9))
@pytest.mark.parametrize("most", range(1, 6))
def test_a_draft_is_two_tokens_shorter_than_what_is_alike(alike: int, most: int):
    """Two tokens meet by chance: in free text most of such drafts would be wrong, and each costs a row."""
    text, then = list(range(11, 19)), list(range(21, 29))
    assert draft([*text, *then, 9, *text[8 - alike :]], most) == then[: min(most, max(0, alike - 2))]


def test_a_copy_that_reaches_the_end_goes_on_with_itself():
    assert draft([5] * 7) == [5, 5, 5, 5]
    assert draft([1, 2, 3] * 4, 5) == [1, 2, 3, 1, 2]
    assert draft([1, 2, 3] * 2, 5) == [1], "three are alike"


@pytest.mark.parametrize("tokens", [[], [1], [1, 1], [1, 2], [1, 2, 3]])
def test_short_texts_have_no_drafts(tokens: list[int]):
    assert draft(tokens) == []
    assert draft([1, 2, 3] * 3, 0) == draft([1, 2, 3] * 3, -1) == []


def start(max_tokens: int = 20, prompt: tuple[int, ...] = (3, 4, 1, 3, 4, 1, 3, 4), **options: object) -> Driver:
    """One request, whose prompt has been computed, with a draft in its hands: the next ones of 3 4 1."""
    scheduler = make_scheduler(speculative_ngram=4, **options)  # type: ignore[arg-type]
    scheduler.add_request(make_request("a", list(prompt), max_tokens))
    driver = Driver(scheduler)
    while not driver.outputs.get("a"):
        driver.step({"a": 1})
    return driver


def test_s1_a_draft_is_more_tokens_to_catch_up_with():
    driver = start()
    request = driver.scheduler.requests["a"]
    assert request.spec_token_ids == [3, 4, 1, 3]
    assert (request.num_tokens, request.num_tokens_with_spec, request.num_computed_tokens) == (9, 13, 8)
    output = driver.schedule()
    assert output.num_scheduled_tokens == {"a": 5}
    assert output.scheduled_spec_decode_tokens == {"a": [3, 4, 1, 3]}
    assert request.num_computed_tokens == 13, "S8"


@pytest.mark.parametrize("right", range(5))
def test_wrong_drafts_are_rolled_back(right: int):
    driver = start()
    request, driver.right = driver.scheduler.requests["a"], right
    driver.step({"a": 7})
    assert driver.outputs["a"] == [1, *[3, 4, 1, 3][:right], 7]
    assert request.num_computed_tokens == request.num_tokens - 1 == 9 + right
    assert (request.metrics.num_draft_tokens, request.metrics.num_accepted_tokens) == (4, right)
    stats = driver.scheduler.stats()
    assert (stats.spec_decode_num_draft_tokens, stats.spec_decode_num_accepted_tokens) == (4, right)
    driver.run()  # reads, at each step, what must stand there (see Driver.execute)


@pytest.mark.parametrize(
    ("options", "scheduled"),
    [
        ({"long_prefill_token_threshold": 3}, [3, 4]),
        ({"max_num_batched_tokens": 2}, [3]),
        ({"max_num_batched_tokens": 1}, []),
        ({"max_model_len": 12}, [3, 4]),
        ({"max_model_len": 10}, []),
        ({"max_tokens": 4}, [3, 4]),
        ({"max_tokens": 2}, []),
    ],
    ids=str,
)
def test_s2_cuts_drafts_and_nothing_is_guessed_beyond_the_end(options: dict[str, int], scheduled: list[int]):
    driver = start(**options)  # type: ignore[arg-type]
    request = driver.scheduler.requests["a"]
    output = driver.schedule()
    assert output.scheduled_spec_decode_tokens.get("a", []) == scheduled == request.spec_token_ids
    assert request.num_computed_tokens == request.num_tokens_with_spec


def test_k9_drafts_are_cached_only_once_accepted():
    driver = start(block_size=4)
    scheduler = driver.scheduler
    kv, request = scheduler.kv, scheduler.requests["a"]
    driver.schedule()
    assert request.num_computed_tokens == 13
    assert len(kv.tables["a"]) == 4
    assert [block.block_hash is not None for block in kv.tables["a"]] == [True, True, False, False]
    driver = start(block_size=4)
    scheduler, driver.right = driver.scheduler, 3
    kv, request = scheduler.kv, scheduler.requests["a"]
    driver.step({"a": 7})
    assert request.num_tokens == 13
    driver.step({"a": 8})
    assert [block.block_hash for block in kv.tables["a"]] == [*request.block_hashes, None]
    assert len(request.block_hashes) == 3, "the three accepted tokens filled it"


@pytest.mark.parametrize("end", ["preempted", "taken back"])
def test_a_preempted_request_has_no_draft(end: str):
    driver = start()
    scheduler, request = driver.scheduler, driver.scheduler.requests["a"]
    output = driver.schedule()
    if end == "preempted":
        scheduler.running.remove(request)
        scheduler._preempt(request)
    else:
        scheduler.take_back(output)
    assert request.status is RequestStatus.PREEMPTED
    assert request.spec_token_ids == []
    assert request.num_tokens_with_spec == request.num_tokens


def test_tokens_after_the_end_are_dropped():
    scheduler = make_scheduler(speculative_ngram=4)
    scheduler.add_request(make_request("a", [5, 1, 2, 3, 4, 5, 1], max_tokens=20))  # 2 ends a text
    driver = Driver(scheduler)
    driver.step({"a": 5})
    assert driver.outputs["a"] == [5]
    scheduler.requests["a"].spec_token_ids = [1, 2, 3, 4]
    driver.right = 4
    driver.step({"a": 9})
    assert driver.outputs["a"] == [5, 1, 2]
    assert driver.reasons == {"a": "stop"}


def test_a_draft_can_take_a_later_requests_blocks_but_the_request_goes_on():
    """S9: at the end one alone always fits, with its drafts."""
    driver = start(num_blocks=4, block_size=4, max_tokens=100)
    driver.right = 4
    driver.run()
    assert len(driver.outputs["a"]) == 8
    assert driver.reasons == {"a": "length"}


@pytest.mark.parametrize("preempted", [False, True])
def test_right_drafts_make_the_next_one_longer_and_after_a_wrong_one_it_begins_anew(preempted: bool):
    """It is the text alone that says how long a draft is: a preemption has no say."""
    text = list(range(11, 40))
    driver = Driver(scheduler := make_scheduler(speculative_ngram=8))
    scheduler.add_request(make_request("a", [*text, 9, *text[:2]], max_tokens=60))
    request, lengths = scheduler.requests["a"], []
    for right, token in ((0, text[2]), (1, text[4]), (3, text[8]), (2, 8), (0, text[0]), (0, text[1]), (0, text[2])):
        driver.right = right
        driver.step({"a": token})
        lengths.append(len(request.spec_token_ids))
        if preempted and lengths == [1, 3]:
            scheduler.take_back(driver.schedule())
            driver.step({"a": text[5]})
            assert request.spec_token_ids == text[6:10], "six are alike"
            break
    else:
        assert lengths == [1, 3, 7, 0, 0, 0, 1]
