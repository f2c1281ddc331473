"""Rules S1-S12, one test or more for each. S13: test_sessions.py."""

import pytest

from nanopd.config import UserError
from nanopd.core.output import KVConnectorOutput, ModelRunnerOutput
from nanopd.request import TRANSITIONS, Request, RequestStatus
from tests.core.drive import Driver, FakeConnector, FakeGrammars, make_request, make_scheduler


def start(*requests: Request, **options: object) -> Driver:
    scheduler = make_scheduler(**options)  # type: ignore[arg-type]
    for request in requests:
        scheduler.add_request(request)
    return Driver(scheduler)


# ------------------------------------------------------------------ S1, S2: the running loop


def test_s1_prefill_and_decode_share_a_step():
    driver = start(make_request("a", 5))
    driver.step()
    driver.scheduler.add_request(make_request("b", 7))
    assert driver.step().num_scheduled_tokens == {"a": 1, "b": 7}


def test_s2_running_first_and_the_budget_cuts_the_last():
    driver = start(make_request("a", 5), make_request("b", 20), max_num_batched_tokens=10)
    assert driver.step().num_scheduled_tokens == {"a": 5, "b": 5}
    assert driver.step().num_scheduled_tokens == {"a": 1, "b": 9}
    assert driver.step().num_scheduled_tokens == {"a": 1, "b": 6}, "now b has caught up"
    assert driver.step().num_scheduled_tokens == {"a": 1, "b": 1}


def test_s2_the_chunk_threshold_leaves_budget_for_others():
    driver = start(make_request("long", 50), make_request("short", 5), long_prefill_token_threshold=8)
    assert driver.step().num_scheduled_tokens == {"long": 8, "short": 5}


def test_s2_only_a_request_that_catches_up_samples():
    driver = start(make_request("a", 20), long_prefill_token_threshold=8)
    for expected in (None, None, [11], [11, 12]):
        driver.step()
        assert driver.outputs.get("a") == expected


def test_s2_a_request_ends_at_max_model_len():
    driver = start(make_request("a", 5, max_tokens=100), max_model_len=9)
    driver.run()
    assert len(driver.outputs["a"]) == 4
    assert driver.reasons == {"a": "length"}


# ------------------------------------------------------------------ S3: preemption


def fill(**options: object) -> tuple[Driver, list[Request]]:
    """Three requests that hold 2 of 6 blocks each and all want a third one in the next step."""
    requests = [make_request(i, 8, max_tokens=3) for i in "abc"]
    driver = start(*requests, num_blocks=6, **options)
    driver.step()
    assert driver.scheduler.kv.pool.num_free_blocks == 0
    return driver, requests


def test_s3_case_a_the_last_one_goes_until_it_fits():
    driver, (_a, _b, c) = fill()
    output = driver.step()
    # c's two blocks are enough for a and b to get one each.
    assert output.num_scheduled_tokens == {"a": 1, "b": 1}
    assert output.preempted_req_ids == {"c"}
    assert (c.status, c.num_computed_tokens) == (RequestStatus.PREEMPTED, 0)
    assert list(driver.scheduler.waiting) == [c]


def test_s3_case_b_a_request_preempts_itself():
    a, b = make_request("a", 8, max_tokens=9), make_request("b", 8, max_tokens=9)
    driver = start(a, b, num_blocks=5)
    driver.step()
    driver.step()  # a takes the fifth block; b finds none and is itself the last
    assert b.status is RequestStatus.PREEMPTED
    assert driver.scheduler.running == [a]
    driver.run()
    assert driver.reasons == {"a": "length", "b": "length"}
    assert b.metrics.num_preemptions >= 1


def test_s3_the_preempted_stand_in_their_old_order_at_the_front():
    driver = start(*(make_request(i, 4, max_tokens=9) for i in "abc"), num_blocks=3)
    driver.step()
    driver.scheduler.add_request(make_request("late", 4))
    assert driver.step().preempted_req_ids == {"b", "c"}, "c for a, and then b for itself"
    assert [r.request_id for r in driver.scheduler.waiting] == ["b", "c", "late"]


def test_s3_a_preempted_request_gets_the_tokens_it_would_have_got():
    driver, requests = fill()
    driver.run()
    assert all(len(driver.outputs[r.request_id]) == 3 for r in requests)
    assert sum(r.metrics.num_preemptions for r in requests) > 0


def test_s3_a_returning_request_hits_its_own_blocks():
    """nano-vllm pull request 211: the request's tables and counters must agree with what it hits."""
    c = make_request("c", 8)
    driver = start(make_request("a", 8), c, num_blocks=4)
    driver.step()
    assert driver.step().preempted_req_ids == {"c"}
    driver.scheduler.finish_requests(["a"])
    output = driver.step()
    assert output.num_scheduled_tokens == {"c": 9 - 4}, "its first block was still there; its second went to a"
    assert c.metrics.num_preemptions == 1


# ------------------------------------------------------------------ S4: the waiting loop


def test_s4_nobody_is_admitted_in_a_step_that_preempted():
    driver, _ = fill()
    driver.scheduler.add_request(make_request("tiny", 1))
    output = driver.step()
    assert output.preempted_req_ids
    assert "tiny" not in output.num_scheduled_tokens


def test_s4_nobody_overtakes_the_head_of_the_queue():
    driver = start(make_request("a", 12), make_request("big", 16), make_request("small", 1), num_blocks=5)
    assert driver.step().num_scheduled_tokens == {"a": 12}
    assert [r.request_id for r in driver.scheduler.waiting] == ["big", "small"]


def test_s4_max_num_seqs():
    driver = start(*(make_request(i, 4) for i in "abc"), max_num_seqs=2)
    assert set(driver.step().num_scheduled_tokens) == {"a", "b"}


# ------------------------------------------------------------------ S5, S6: remote loads


def remote(num_tokens: int | None, prompt: int = 10, **options: object) -> tuple[Driver, FakeConnector, Request]:
    connector, request = FakeConnector(), make_request("r", prompt)
    connector.remote["r"] = num_tokens
    return start(request, connector=connector, **options), connector, request


def test_s5_blocks_now_tokens_later():
    driver, connector, request = remote(10)
    output = driver.step()
    assert output.num_scheduled_tokens == {}
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert connector.allocated == [("r", [0, 1, 2], 10)]
    assert list(driver.scheduler.skipped_waiting) == [request]
    driver.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS, "not there yet: skipped again"


def test_k8_what_came_is_registered_even_if_its_request_cannot_go_on_yet():
    driver, _, request = remote(4, prompt=8, num_blocks=3)
    driver.step()
    driver.scheduler.add_request(make_request("other", 8, max_tokens=1))
    driver.transfers = KVConnectorOutput(finished_recving={"r"})
    driver.schedule()  # "other" takes the last two blocks
    driver.scheduler.finished_recving_kv_req_ids.add("r")
    driver.scheduler.loading.remove("r")
    driver.schedule()
    assert request.status is RequestStatus.WAITING
    assert request.block_hashes[0] in driver.scheduler.kv.pool.cached_block_hash_to_block


def test_k8_a_loading_block_cannot_be_hit_before_its_data_is_there():
    driver, _, request = remote(10)
    driver.step()
    assert not driver.scheduler.kv.pool.cached_block_hash_to_block
    driver.transfers = KVConnectorOutput(finished_recving={"r"})
    driver.step()
    driver.step()
    assert request.block_hashes[0] in driver.scheduler.kv.pool.cached_block_hash_to_block


def test_s5_when_every_token_came_the_last_is_computed_again():
    driver, _, request = remote(10)
    driver.step()
    driver.transfers = KVConnectorOutput(finished_recving={"r"})
    driver.step()
    output = driver.step()
    assert output.num_scheduled_tokens == {"r": 1}
    assert output.scheduled_new_reqs[0].num_computed_tokens == 9
    assert request.metrics.num_cached_tokens == 10
    driver.run()
    assert driver.reasons == {"r": "length"}


def test_s5_a_part_from_elsewhere_and_the_rest_here():
    driver, _, _request = remote(8, prompt=20)
    driver.step()
    driver.transfers = KVConnectorOutput(finished_recving={"r"})
    driver.step()
    assert driver.step().num_scheduled_tokens == {"r": 12}
    driver.run()


def test_s5_a_prompt_of_one_token_that_comes_from_elsewhere():
    """Promoted with 0 computed tokens (the last one is recomputed) and blocks in hand: it must not be looked up again."""
    driver, connector, _ = remote(1, prompt=1)
    driver.step()
    connector.remote["r"] = 1
    driver.transfers = KVConnectorOutput(finished_recving={"r"})
    driver.step()
    assert driver.step().num_scheduled_tokens == {"r": 1}


def test_s5_a_synchronous_hit_still_computes_one_token():
    driver, connector, _ = remote(10)
    connector.load_async = False
    output = driver.step()
    assert output.num_scheduled_tokens == {"r": 1}
    assert connector.allocated == [("r", [0, 1, 2], 9)]


def test_s5_local_hits_first_the_rest_from_elsewhere():
    driver, connector, _ = remote(10)
    first = make_request("first", list(range(8)), max_tokens=1)
    driver.scheduler.finish_requests(["r"])
    driver.scheduler.add_request(first)
    driver.run()
    connector.remote["s"] = 10
    driver.scheduler.add_request(make_request("s", list(range(10))))
    driver.step()
    assert connector.allocated[-1][0::2] == ("s", 2), "8 were found here"


def test_s4_not_known_yet_is_skipped_and_asked_first_next_time():
    driver, connector, request = remote(None)
    driver.scheduler.add_request(make_request("other", 4))
    assert driver.step().num_scheduled_tokens == {"other": 4}
    assert list(driver.scheduler.skipped_waiting) == [request]
    connector.remote["r"] = 0
    driver.scheduler.add_request(make_request("later", 4))
    assert list(driver.step().num_scheduled_tokens) == ["other", "r", "later"]


def test_s6_the_skipped_keep_their_order():
    connector = FakeConnector()
    requests = [make_request(i, 4) for i in "abcd"]
    connector.remote = {"a": None, "b": 4, "c": None}
    driver = start(*requests, connector=connector)
    for _ in range(3):
        driver.step()
        assert [r.request_id for r in driver.scheduler.skipped_waiting] == ["a", "b", "c"]


def test_s6_those_passed_over_stay_ahead_of_those_not_reached():
    connector = FakeConnector()
    connector.remote = {"a": None, "big": None}
    driver = start(make_request("a", 4), make_request("big", 12), connector=connector, num_blocks=4)
    driver.step()
    driver.scheduler.add_request(make_request("other", 8))
    driver.step()
    connector.remote["big"] = 0  # known now, but it does not fit: the loop ends there, and a was passed over
    driver.step()
    assert [r.request_id for r in driver.scheduler.skipped_waiting] == ["a", "big"]


# ------------------------------------------------------------------ S7, S8: the output


def test_s7_whole_data_once_then_only_the_delta():
    driver = start(make_request("a", 4, max_tokens=9))
    first = driver.step().scheduled_new_reqs[0]
    assert (len(first.token_ids), first.block_ids, first.num_computed_tokens) == (4, [0], 0)
    second = driver.step()
    assert not second.scheduled_new_reqs
    assert [(c.new_block_ids, c.num_computed_tokens) for c in second.scheduled_cached_reqs] == [([1], 4)]
    assert driver.step().scheduled_cached_reqs[0].new_block_ids == []


def test_s7_the_worker_hears_once_who_finished_and_who_was_preempted():
    driver, _ = fill()
    assert driver.step().preempted_req_ids == {"c"}
    assert driver.step().preempted_req_ids == set()
    driver.scheduler.finish_requests(["a"])
    assert "a" in driver.step().finished_req_ids
    assert "a" not in driver.step().finished_req_ids


def test_s7_a_resumed_request_is_new_to_the_worker():
    driver, (_, _, c) = fill()
    driver.step()
    driver.scheduler.finish_requests(["a", "b"])
    (resumed,) = driver.step().scheduled_new_reqs
    assert (resumed.request_id, resumed.num_prompt_tokens) == ("c", 8)
    assert resumed.token_ids[:8] == c.token_ids.tolist()[:8]
    assert len(resumed.token_ids) == 9, "the token it had already sampled comes along"


def test_s8_the_next_step_can_be_planned_before_this_one_ran():
    driver = start(make_request("a", 20), long_prefill_token_threshold=8)
    assert [driver.scheduler.schedule().num_scheduled_tokens["a"] for _ in range(3)] == [8, 8, 4]


# ------------------------------------------------------------------ S9: admission


@pytest.mark.parametrize("prompt", [16, 17, 1000])
def test_s9_what_can_never_fit_is_refused_at_once(prompt: int):
    """vLLM issue 39734, nano-vllm issue 274: larger than the pool, though within what the model knows."""
    driver = start(num_blocks=4, block_size=4, max_model_len=4096)
    assert driver.scheduler.max_model_len == 16
    with pytest.raises(UserError, match="max_model_len is 16"):
        driver.scheduler.add_request(make_request("a", prompt))
    assert not driver.scheduler.requests


def test_s9_a_sequence_that_fills_the_cache_exactly_finishes():
    driver = start(
        make_request("a", 15, max_tokens=100), make_request("b", 14, max_tokens=100), num_blocks=4, block_size=4
    )
    driver.run()
    assert {i: len(tokens) for i, tokens in driver.outputs.items()} == {"a": 1, "b": 2}


def test_s9_bad_requests_are_refused_with_a_reason():
    driver = start(make_request("a", 4))
    with pytest.raises(UserError, match="already in use"):
        driver.scheduler.add_request(make_request("a", 4))
    with pytest.raises(UserError, match="empty"):
        driver.scheduler.add_request(make_request("b", []))
    driver.run()


# ------------------------------------------------------------------ S10, S11: failed loads, progress


def test_s10_recompute_forgets_the_external_tokens():
    driver, _, request = remote(10)
    driver.step()
    driver.transfers = KVConnectorOutput(failed_recving={"r"})
    driver.step()
    assert driver.scheduler.kv.pool.num_free_blocks == 64
    output = driver.step()
    assert output.num_scheduled_tokens == {"r": 10}
    assert (request.num_external_tokens, request.ask_connector) == (0, False)


def test_s10_fail_ends_the_request_with_an_error_at_once():
    driver, _, request = remote(10, kv_load_failure_policy="fail")
    driver.step()
    driver.transfers = KVConnectorOutput(failed_recving={"r"})
    driver.step()
    assert driver.reasons == {"r": "error"}
    assert "could not be loaded" in str(request.stop_reason)
    assert not driver.scheduler.has_unfinished_requests()


def test_s10_loaded_requests_that_hold_all_blocks_do_not_starve_the_head():
    """a, b and c wait for data and hold the whole pool; it comes for b and c, which need one block more to go on, and so
    does a: nobody can move. The last of them gives way."""
    connector = FakeConnector()
    requests = [make_request(i, 8, max_tokens=2) for i in "abc"]
    connector.remote = dict.fromkeys("abc", 4)
    driver = start(*requests, connector=connector, num_blocks=3)
    driver.step()
    assert driver.scheduler.kv.pool.num_free_blocks == 0
    driver.transfers = KVConnectorOutput(finished_recving=set("abc"))
    driver.run(100)
    assert driver.reasons == dict.fromkeys("abc", "length")


def test_s10_a_failed_head_in_front_of_loaded_holders():
    """A request that failed to load stands first and needs blocks that two loaded ones behind it hold."""
    connector = FakeConnector()
    requests = [make_request(i, 8, max_tokens=2) for i in "abc"]
    connector.remote = dict.fromkeys("abc", 8)
    driver = start(*requests, connector=connector, num_blocks=6)
    driver.step()
    driver.transfers = KVConnectorOutput(failed_recving={"a"}, finished_recving={"b", "c"})
    driver.run(100)
    assert driver.reasons == dict.fromkeys("abc", "length")


def test_s11_nothing_to_do_and_nothing_in_flight_is_a_bug_and_raises():
    driver = start(make_request("a", 4))
    driver.scheduler.kv.pool.get_new_blocks(64)  # blocks leak: nobody holds them, nobody will give them back
    with pytest.raises(RuntimeError, match="no block can be freed"):
        driver.scheduler.schedule()


def test_s11_waiting_for_a_load_is_no_dead_end():
    driver, _, _ = remote(10)
    for _ in range(50):
        assert driver.step().num_scheduled_tokens == {}


# ------------------------------------------------------------------ a step that does not finish


def test_what_was_planned_but_never_computed_cannot_be_found():
    driver = start(make_request("a", list(range(20))), make_request("b", [*range(20), 5]))
    driver.fail_step()
    assert not driver.scheduler.kv.pool.cached_block_hash_to_block
    assert [r.request_id for r in driver.scheduler.waiting] == ["a", "b"]
    driver.run()  # `execute` checks every read
    assert driver.reasons == {"a": "length", "b": "length"}


def test_a_failed_step_keeps_what_earlier_steps_computed_and_tells_the_worker_again_who_finished():
    a, b = make_request("a", 17, max_tokens=9), make_request("b", 4, max_tokens=1)
    driver = start(a, b)
    driver.step()
    assert driver.reasons == {"b": "length"}
    driver.fail_step()
    output = driver.step()
    assert output.finished_req_ids == {"b"}, "the worker may have missed it"
    assert output.lost_req_ids == {"a"}, "alive: a connector must not take it for finished"
    assert output.num_scheduled_tokens == {"a": 18 - 16}, "the blocks of the first step were still good"
    driver.run()


def test_the_connector_hears_of_a_plan_that_was_not_carried_out():
    driver, connector, _ = remote(10)
    driver.fail_step()
    assert len(connector.failed_plans) == 1


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_while_planning_loses_nobody(error: type[BaseException]):
    connector = FakeConnector()
    skipped, running, new, bad = (make_request(i, 8, max_tokens=3) for i in ("skip", "run", "new", "bad"))
    driver = start(running, connector=connector)
    driver.step()
    connector.remote["skip"] = None
    original = connector.get_num_new_matched_tokens

    def fail_for_bad(request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        connector.raises = error if request is bad else None
        return original(request, num_computed_tokens)

    connector.get_num_new_matched_tokens = fail_for_bad  # type: ignore[method-assign]
    for request in (skipped, new, bad):
        driver.scheduler.add_request(request)
    with pytest.raises(error):
        driver.scheduler.schedule()
    driver.scheduler.check_invariants()
    connector.get_num_new_matched_tokens, connector.raises = original, None  # type: ignore[method-assign]
    connector.remote.clear()
    driver.run()
    assert driver.reasons == dict.fromkeys(("run", "skip", "new", "bad"), "length")


def test_a_connector_that_fails_when_blocks_are_given_out_loses_nobody():
    driver, connector, request = remote(4, prompt=8)
    connector.load_async = False
    original = connector.update_state_after_alloc

    def fail(*_: object) -> None:
        raise RuntimeError

    connector.update_state_after_alloc = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        driver.scheduler.schedule()
    driver.scheduler.check_invariants()
    assert list(driver.scheduler.waiting) == [request]
    assert not driver.scheduler.kv.pool.cached_block_hash_to_block
    connector.update_state_after_alloc = original  # type: ignore[method-assign]
    driver.run()
    assert driver.reasons == {"r": "length"}


def test_s5_a_connector_that_promises_more_than_the_prompt_is_not_believed():
    driver, connector, _ = remote(10)
    connector.get_num_new_matched_tokens = lambda request, num_computed_tokens: (99, True)  # type: ignore[method-assign]
    driver.step()
    assert connector.allocated == [("r", [0, 1, 2], 10)]


def test_a_remote_load_that_built_on_a_failed_step_is_computed_here():
    connector = FakeConnector()
    driver = start(make_request("a", list(range(20))), make_request("r", [*range(20), 1, 2, 3]), connector=connector)
    connector.remote["r"] = 23
    driver.fail_step()
    driver.transfers = KVConnectorOutput(finished_recving={"r"})
    driver.run()
    assert driver.reasons == {"a": "length", "r": "length"}


# ------------------------------------------------------------------ ends


GRAMMAR = {"regex": "x"}


def with_grammar(*requests: Request, **options: object) -> tuple[Driver, FakeGrammars]:
    grammars = FakeGrammars()
    scheduler = make_scheduler(grammars=grammars, **options)
    for request in requests:
        scheduler.add_request(request)
    return Driver(scheduler), grammars


@pytest.mark.parametrize("state", ["waiting", "compiling", "running", "preempted", "loading", "loaded"])
def test_abort_in_every_state_frees_everything(state: str):
    if state in ("loading", "loaded"):
        driver, _, request = remote(10)
        driver.step()
        if state == "loaded":
            driver.transfers = KVConnectorOutput(finished_recving={"r"})
            driver.step()
    elif state == "preempted":
        driver, (_, _, request) = fill()
        driver.step()
    elif state == "compiling":
        request = make_request("x", 4, structured_outputs=GRAMMAR)
        driver, grammars = with_grammar(request)
        driver.step()
    else:
        request = make_request("x", 4)
        driver = start(request)
        if state == "running":
            driver.step()
    driver.scheduler.finish_requests([request.request_id, "unknown"])
    assert request.status is RequestStatus.FINISHED_ABORTED
    assert state != "compiling" or not (grammars.alive or driver.scheduler.compiling)
    if state == "loading":  # P4: the peer may still write; the blocks wait for its word
        assert driver.scheduler.kv.pool.num_free_blocks < 64
        driver.transfers = KVConnectorOutput(failed_recving={"r"})
    driver.run()
    driver.scheduler.check_invariants()


def test_p4_blocks_that_are_being_sent_stay_until_the_worker_says_so():
    connector = FakeConnector()
    connector.delay_free.add("a")
    driver = start(make_request("a", 8, max_tokens=1), connector=connector)
    driver.step()
    assert driver.reasons == {"a": "length"}
    assert driver.scheduler.kv.pool.num_free_blocks == 62
    with pytest.raises(UserError, match="already in use"):
        driver.scheduler.add_request(make_request("a", 8))
    driver.transfers = KVConnectorOutput(finished_sending={"a"})
    driver.step()
    assert driver.scheduler.kv.pool.num_free_blocks == 64


def test_s12_a_request_whose_grammar_is_not_ready_is_passed_and_goes_first_when_it_is():
    a, b = make_request("a", structured_outputs=GRAMMAR), make_request("b")
    driver, grammars = with_grammar(a, b, max_num_seqs=2)
    assert driver.step().num_scheduled_tokens == {"b": 8}
    assert a.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    assert list(driver.scheduler.skipped_waiting) == [a] and not driver.scheduler.kv.get_block_ids("a")
    driver.scheduler.add_request(make_request("c"))
    grammars.news["a"] = None
    driver.step()  # reported at the end of this step, in which c has taken the seat
    assert a.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    assert driver.scheduler.stats().num_compiling == 0
    driver.scheduler.finish_requests(["c"])
    driver.scheduler.add_request(make_request("d"))
    output = driver.step()
    assert output.num_scheduled_tokens == {"b": 1, "a": 8} and output.grammar_bitmask.keys() == {"a"}
    assert [status for _, status in a.metrics.history] == ["waiting", "waiting for grammar", "waiting", "running"]


def test_s12_a_mask_only_in_the_step_that_samples():
    driver, grammars = with_grammar(make_request("a", 10, structured_outputs=GRAMMAR), max_num_batched_tokens=4)
    grammars.news["a"] = None
    driver.step()
    assert [sorted(driver.step().grammar_bitmask) for _ in range(4)] == [[], [], ["a"], ["a"]]


def test_s12_a_grammar_that_cannot_be_used_ends_its_request_alone():
    a, b = make_request("a", structured_outputs=GRAMMAR), make_request("b")
    driver, grammars = with_grammar(a, b)
    grammars.news["a"] = "too large"
    driver.step()
    assert driver.reasons == {"a": "error"} and a.stop_reason == "too large" and not grammars.alive
    driver.run()
    assert driver.reasons == {"a": "error", "b": "length"}


def test_s12_a_matcher_that_fails_ends_its_request_without_the_token_of_that_step():
    a, b = make_request("a", max_tokens=9, structured_outputs=GRAMMAR), make_request("b", max_tokens=9)
    driver, grammars = with_grammar(a, b)
    grammars.news["a"] = None
    driver.step()
    driver.step()
    before = list(driver.outputs["a"])
    grammars.alive.remove("a")  # no mask, and the reason follows
    grammars.news["a"] = "too many states"
    output = driver.scheduler.schedule()
    driver.take(driver.scheduler.update_from_output(output, ModelRunnerOutput({"a": [7], "b": [7]})))
    assert driver.outputs["a"] == before and driver.reasons == {"a": "error"} and driver.outputs["b"][-1] == 7
    driver.scheduler.check_invariants()


def test_s11_waiting_for_a_grammar_is_no_dead_end():
    driver, grammars = with_grammar(make_request("a", structured_outputs=GRAMMAR))
    for _ in range(5):
        assert not driver.step().num_scheduled_tokens
    grammars.news["a"] = None
    driver.run()
    assert driver.reasons == {"a": "length"}


def test_s12_a_compiled_request_behind_a_head_without_blocks_does_not_look_like_something_in_flight():
    """A grammar that is ready brings nothing more by itself: somebody has to give way (S10)."""
    connector, grammars = FakeConnector(), FakeGrammars()
    scheduler = make_scheduler(num_blocks=4, connector=connector, grammars=grammars)
    connector.remote = {"a": 8, "b": 8}
    for request in (make_request("a", 9), make_request("b", 9), make_request("g", 4, structured_outputs=GRAMMAR)):
        scheduler.add_request(request)
    driver = Driver(scheduler)
    driver.step()
    grammars.news["g"] = None
    driver.transfers = KVConnectorOutput(finished_recving={"a", "b"})
    driver.step()
    driver.run(50)
    assert driver.reasons.keys() == {"a", "b", "g"}


def test_s12_a_finished_grammar_ends_the_request_before_min_tokens_and_with_ignore_eos():
    early = make_request("a", max_tokens=9, min_tokens=5, ignore_eos=True, structured_outputs=GRAMMAR)
    plain = make_request("b", max_tokens=9, min_tokens=5)
    driver, grammars = with_grammar(early, plain)
    grammars.news["a"] = None
    driver.step()
    driver.step({"a": 2, "b": 2})
    assert driver.reasons == {"a": "stop"} and early.stop_reason is None


def test_stop_tokens_and_min_tokens():
    a = make_request("eos", 4, max_tokens=9)
    b = make_request("ignores", 4, max_tokens=3, ignore_eos=True)
    c = make_request("stop id", 4, max_tokens=9, stop_token_ids=[7])
    d = make_request("not yet", 4, max_tokens=9, min_tokens=3)
    driver = start(a, b, c, d)
    for _ in range(3):
        driver.step({"eos": 2, "ignores": 2, "stop id": 7, "not yet": 2})
    assert driver.reasons == {"eos": "stop", "ignores": "length", "stop id": "stop", "not yet": "stop"}
    assert [len(driver.outputs[i]) for i in ("eos", "ignores", "stop id", "not yet")] == [1, 3, 1, 3]
    assert (a.stop_reason, c.stop_reason) == (None, 7)


def test_the_table_of_transitions_is_obeyed():
    for status in RequestStatus:
        for new in RequestStatus:
            request = make_request("a", 4)
            request._status = status
            if new in TRANSITIONS[status]:
                request.status = new
            else:
                with pytest.raises(RuntimeError, match="not a legal transition"):
                    request.status = new
    assert all(not TRANSITIONS[s] for s in RequestStatus if s.is_finished)
