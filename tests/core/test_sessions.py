"""Rule S13: sessions, requests that stay open after an answer and get further input under the same id."""

import pytest

from nanopd.config import SamplingParams, UserError
from nanopd.core.debug import describe
from nanopd.core.scheduler import Scheduler
from nanopd.request import Request, RequestStatus
from tests.core.drive import Driver, FakeGrammars, make_request, make_scheduler

IDLE = RequestStatus.WAITING_FOR_STREAMING_REQ


def say(scheduler: Scheduler, turn: int, tokens: int = 4, max_tokens: int = 3, request_id: str = "s", **params: object):
    """One input of a session: tokens that nobody else has."""
    start = 10_000 * (turn + 1) + 1000 * ord(request_id)
    sampling = SamplingParams(max_tokens=max_tokens, seed=0, **params)
    scheduler.add_request(Request(request_id, range(start, start + tokens), sampling, [2], turn=turn))


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_the_next_turn_computes_only_what_is_new(prefix_caching):
    """KV is kept: the second turn computes its input and the last token of the first answer, in the same blocks."""
    driver = Driver(scheduler := make_scheduler(prefix_caching=prefix_caching))
    say(scheduler, 0, tokens=6)
    driver.run()
    session = scheduler.requests["s"]
    assert session.status is IDLE and not scheduler.running and scheduler.sessions.idle == {"s": session}
    held = scheduler.kv.get_block_ids("s")
    say(scheduler, 1, tokens=5)
    output = driver.step()
    assert output.num_scheduled_tokens == {"s": 6} and output.lost_req_ids == {"s"}
    assert [(new.request_id, new.num_prompt_tokens) for new in output.scheduled_new_reqs] == [("s", 6 + 3 + 5)]
    assert scheduler.kv.get_block_ids("s")[: len(held)] == held
    assert session.metrics.num_cached_tokens == 8
    driver.run()
    assert driver.outputs["s"] == session.token_ids[6:9].tolist() + session.token_ids[14:].tolist()
    assert session.num_output_tokens == 3


def test_input_that_comes_early_waits_in_the_streaming_queue():
    driver = Driver(scheduler := make_scheduler())
    say(scheduler, 0)
    driver.step()
    say(scheduler, 1)
    say(scheduler, 2)
    session = scheduler.requests["s"]
    assert [turn.turn for turn in session.streaming_queue] == [1, 2] and session.num_tokens == 5
    driver.run()
    assert session.status is IDLE and session.turn == 2 and session.num_tokens == 3 * (4 + 3)
    assert len(driver.outputs["s"]) == 9


def test_an_idle_session_is_no_work_takes_no_seat_and_can_be_aborted():
    driver = Driver(scheduler := make_scheduler(max_num_seqs=1))
    say(scheduler, 0)
    driver.run()
    assert not scheduler.has_unfinished_requests() and scheduler.stats().num_idle == 1
    scheduler.add_request(make_request("a"))
    driver.run()
    assert driver.reasons["a"] == "length"
    scheduler.finish_requests(["s"])
    driver.step()
    assert not scheduler.requests and scheduler.kv.usage == 0


def test_the_longest_idle_gives_up_its_blocks_before_anyone_is_preempted():
    driver = Driver(scheduler := make_scheduler(num_blocks=8))
    for name in ("s", "t"):
        say(scheduler, 0, request_id=name)  # 2 blocks each
        driver.run()
    scheduler.add_request(make_request("a", 8, max_tokens=12))  # grows to 5 blocks
    driver.run()
    assert scheduler.stats().num_preemptions == 0
    assert [*scheduler.kv.tables] == ["t"]
    say(scheduler, 1)
    driver.run()
    assert scheduler.requests["s"].num_tokens == 14, "it goes on, with what it has to compute again"


def test_the_head_of_the_queue_gets_them_too_and_looks_its_hits_up_again():
    driver = Driver(scheduler := make_scheduler(num_blocks=5))
    say(scheduler, 0, tokens=9)
    driver.run()
    shared = scheduler.requests["s"].token_ids[:8].tolist()
    scheduler.add_request(make_request("a", [*shared, *range(5, 14)], max_tokens=1))  # 5 blocks, 2 of them shared
    output = driver.step()
    assert output.num_scheduled_tokens == {"a": 9} and "s" not in scheduler.kv.tables


def test_a_session_that_waits_gives_way_to_those_that_run():
    """The blocks of a session with new input, for which there is no seat, go before a running request is preempted."""
    driver = Driver(scheduler := make_scheduler(num_blocks=6, max_num_seqs=1))
    say(scheduler, 0)
    driver.run()
    scheduler.add_request(make_request("a", 8, max_tokens=14))
    driver.step()
    say(scheduler, 1)
    driver.run()
    assert driver.reasons["a"] == "length" and scheduler.stats().num_preemptions == 0
    assert scheduler.requests["s"].status is IDLE and scheduler.requests["s"].num_tokens == 14


def test_sessions_that_hold_all_blocks_do_not_stand_still():
    """Both have input, each needs more blocks than are free, and nobody runs who could be preempted (S10)."""
    driver = Driver(scheduler := make_scheduler(num_blocks=6))
    for name in ("s", "t"):
        say(scheduler, 0, tokens=8, request_id=name)
    driver.run()
    assert scheduler.kv.pool.num_free_blocks == 0
    for name in ("s", "t"):
        say(scheduler, 1, tokens=8, request_id=name)
    driver.run()
    assert all(r.status is IDLE and r.num_tokens == 22 for r in scheduler.requests.values())


def test_what_can_not_be_taken_is_refused_and_what_came_before_stays():
    driver = Driver(scheduler := make_scheduler(max_model_len=20))
    with pytest.raises(UserError, match="has ended"):
        say(scheduler, 1)
    say(scheduler, 0)
    with pytest.raises(UserError, match="already in use"):
        say(scheduler, 0)
    driver.run()
    with pytest.raises(UserError, match=r"has 13 tokens; .* at most 12 tokens: .*, after 7 tokens in this session"):
        say(scheduler, 1, tokens=13)
    with pytest.raises(UserError, match="empty"):
        say(scheduler, 1, tokens=0)
    say(scheduler, 1, tokens=12)
    driver.run()
    assert driver.reasons == {"s": "length"} and scheduler.requests["s"].num_tokens == 20


@pytest.mark.parametrize("tokens", [8, 15, 25])
def test_early_input_that_is_too_long_is_refused_in_its_turn_and_the_session_goes_on(tokens: int):
    """It has become too long, or it was that when it came; nobody hears of it before the answer before it has ended."""
    driver = Driver(scheduler := make_scheduler(max_model_len=20))
    say(scheduler, 0, max_tokens=10)
    driver.step()
    say(scheduler, 1, tokens=tokens)
    say(scheduler, 2, tokens=2)
    assert scheduler.stats().num_early == 2 and describe(scheduler)["streaming_queue"] == ["s", "s"]
    driver.run()
    assert scheduler.stats().num_early == 0
    assert driver.ends == [("s", 0, "length"), ("s", 1, "error"), ("s", 2, "length")]
    assert scheduler.requests["s"].num_tokens == 4 + 10 + 2 + 3 and scheduler.requests["s"].status is IDLE


def test_who_goes_away_takes_the_own_input_along_and_nobody_elses():
    driver = Driver(scheduler := make_scheduler())
    for turn in range(3):
        say(scheduler, turn, max_tokens=50)
    driver.step()
    scheduler.sessions.abort_turn("s", 1)  # waits in the queue: forgotten
    assert [turn.turn for turn in scheduler.requests["s"].streaming_queue] == [2]
    scheduler.sessions.abort_turn("s", 0)  # runs: ends with the next token
    driver.step()
    assert driver.ends == [("s", 0, "length")] and len(driver.outputs["s"]) == 2
    driver.run()
    assert driver.ends[1:] == [("s", 2, "length")] and scheduler.requests["s"].num_tokens == 4 + 2 + 4 + 50
    for turn in (0, 1, 2, 7):  # all over: nothing happens
        scheduler.sessions.abort_turn("s", turn)
    scheduler.sessions.abort_turn("nobody", 0)
    assert scheduler.requests["s"].status is IDLE


def test_drafts_of_an_answer_that_has_ended_are_forgotten():
    driver = Driver(scheduler := make_scheduler(speculative_ngram=3))
    driver.right = 3
    scheduler.add_request(Request("s", [5, 6, 7, 5, 6, 7, 5, 6], SamplingParams(max_tokens=2, seed=0), [2], turn=0))
    driver.step({"s": 7})
    assert scheduler.requests["s"].spec_token_ids == []  # one token is left: nothing to draft
    say(scheduler, 1, max_tokens=9)
    driver.run()
    assert scheduler.requests["s"].spec_token_ids == [] and scheduler.requests["s"].num_output_tokens == 9


def test_each_turn_has_a_grammar_of_its_own():
    driver = Driver(scheduler := make_scheduler(grammars=(grammars := FakeGrammars())))
    say(scheduler, 0, structured_outputs={"regex": "x"})
    grammars.news["s"] = None
    driver.run(20)
    assert not grammars.alive, "the first answer's matcher is gone"
    say(scheduler, 1)
    driver.run()
    say(scheduler, 2, structured_outputs={"regex": "y"})
    assert scheduler.requests["s"].status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    driver.step()
    grammars.news["s"] = "too large"
    driver.step()
    assert driver.ends[-1] == ("s", 2, "error")
    assert scheduler.requests["s"].status is IDLE and not scheduler.compiling and not grammars.alive
    say(scheduler, 3, structured_outputs={"regex": "z"})
    grammars.news["s"] = None
    driver.step()
    driver.step()
    grammars.news["s"] = "fuel exhausted"  # the matcher fails while it runs
    driver.step()
    assert driver.ends[-1] == ("s", 3, "error") and scheduler.requests["s"].status is IDLE
    say(scheduler, 4)
    driver.run()
    assert driver.ends[-1] == ("s", 4, "length")


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("computed", [False, True])
def test_input_that_is_refused_for_its_grammar_leaves_the_session(prefix_caching: bool, computed: bool):
    """`computed`: its matcher fails when the first token is due: K and V of it are there. The driver sees what is read."""
    driver = Driver(scheduler := make_scheduler(prefix_caching=prefix_caching, grammars=(grammars := FakeGrammars())))

    def refused(turn: int) -> None:
        say(scheduler, turn, tokens=9, structured_outputs={"regex": "x"})
        if computed:
            grammars.news["s"] = None
            driver.step()
        grammars.news["s"] = "no"
        assert bool(driver.step().num_scheduled_tokens) == computed
        assert driver.ends[-1] == ("s", turn, "error")

    refused(0)
    session = scheduler.requests["s"]
    assert session.status is IDLE and session.num_tokens == session.num_computed_tokens == 0
    say(scheduler, 1, tokens=6)
    driver.run()
    said = session.token_ids.tolist()
    refused(2)
    refused(3)
    assert session.token_ids.tolist() == said and len(session.block_hashes) == prefix_caching * 2
    kept = 0 if computed and not prefix_caching else 8
    say(scheduler, 4, tokens=9)
    driver.run()
    assert session.num_tokens == 6 + 3 + 9 + 3 and driver.ends[-1] == ("s", 4, "length")
    assert session.metrics.num_cached_tokens == kept
