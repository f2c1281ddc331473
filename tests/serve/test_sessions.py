"""Sessions over HTTP: opened, fed, ended by the client, by time, or because the client has gone."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nanopd import LLM, SamplingParams, UserError
from nanopd.serve.config import ServeConfig
from tests.serve.conftest import Server

GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), dtype="float32", num_blocks=300)


def open_session(server: Server, **headers: str) -> str:
    status, answer, _ = server.request("/v1/sessions", b"", headers)
    assert status == 201 and answer["object"] == "session" and answer["timeout"] > 0
    return str(answer["id"])


def say(server: Server, session: str, prompt: Any, **options: Any) -> Any:
    return server.post("/v1/completions", prompt=prompt, session=session, return_token_ids=True, **(GREEDY | options))


def refused(server: Server, path: str, **body: Any) -> tuple[int, str]:
    status, answer, _ = server.request(path, body)
    return status, answer["error"]["message"]


def delete(server: Server, session: str) -> tuple[int, Any]:
    return server.request(f"/v1/sessions/{session}", method="DELETE")[:2]


def test_a_conversation(server: Server, llm: LLM):
    session = open_session(server, **{"X-Request-Id": "talk"})
    assert session == "talk"
    so_far: list[int] = []
    for said in ([1, 2, 3] * 7, [4, 5], [6]):
        answer = say(server, session, said)
        so_far += said
        tokens = answer["choices"][0]["token_ids"]
        assert tokens == llm.generate([so_far], SamplingParams(**GREEDY))[0].outputs[0].token_ids
        assert answer["usage"]["prompt_tokens"] == len(so_far), "it attends to all of these"
        kept = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert kept == (len(so_far) - len(said) - 1 if len(so_far) > 21 else 0)
        so_far += tokens
    state = server.state()
    assert state["idle"] == ["talk"] and state["requests"]["talk"]["status"] == "waiting for input"
    assert "nanopd:num_requests_idle 1.0" in server.request("/metrics")[1]
    assert "nanopd:num_requests_early 0.0" in server.request("/metrics")[1] and state["streaming_queue"] == []
    assert delete(server, session) == (200, {"id": "talk", "object": "session", "deleted": True})
    assert delete(server, session)[0] == 404
    assert server.state()["requests"] == {}
    server.wait_empty()


def test_input_may_come_while_an_answer_is_written(server: Server, llm: LLM):
    session = open_session(server)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(say, server, session, [7] * 5, max_tokens=60)
        while not server.state()["running"]:
            time.sleep(0.005)
        second = pool.submit(say, server, session, [8] * 5)
        so_far = [7] * 5 + first.result()["choices"][0]["token_ids"] + [8] * 5
    expected = llm.generate([so_far], SamplingParams(**GREEDY))[0].outputs[0].token_ids
    assert second.result()["choices"][0]["token_ids"] == expected
    delete(server, session)


def test_input_that_is_too_long_gets_the_same_answer_early_and_late(server: Server):
    """It is the client's mistake, and nothing hangs: 400, with how much there is room for, when its turn comes."""
    session = open_session(server)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(say, server, session, [7] * 5, max_tokens=200)
        while server.state()["requests"].get(session, {"num_tokens": 0})["num_tokens"] < 20:
            time.sleep(0.005)
        early = [pool.submit(refused, server, "/v1/completions", prompt=[8] * n, session=session) for n in (500, 310)]
        assert first.result()["usage"]["total_tokens"] == 205
    wanted = "at most 306 tokens: max_model_len is 512, with the output, after 205 tokens in this session."
    for n, result in zip((500, 310), early):
        assert result.result() == (400, f"The prompt has {n} tokens; it can't be empty, and have {wanted}")
        assert refused(server, "/v1/completions", prompt=[8] * n, session=session) == result.result()
    assert say(server, session, [9] * 306)["usage"]["prompt_tokens"] == 511
    assert "the session is full" in refused(server, "/v1/completions", prompt=[8], session=session)[1]
    delete(server, session)


def test_a_long_text_in_one_session_does_not_hold_up_another(server: Server):
    """They are tokenized one after the other in a session, and side by side in two."""
    slow, other = open_session(server), open_session(server)
    with ThreadPoolExecutor() as pool:
        long = pool.submit(refused, server, "/v1/completions", prompt="lorem ipsum " * 100_000, session=slow)
        time.sleep(0.1)
        say(server, other, "hello")
        assert not long.done()
        assert long.result()[0] == 400
    delete(server, slow), delete(server, other)


def test_what_a_session_does_not_take(server: Server):
    assert refused(server, "/v1/sessions", timeout=5)[0] == 400
    session = open_session(server)
    for options, status, word in (
        ({"prompt": ["a", "b"]}, 400, "one prompt"),
        ({"n": 2}, 400, "takes no n"),
        ({"stop": "x"}, 400, "takes no n, stop"),
        ({"prompt": "", "echo": True}, 400, "echo"),
        ({"session": "nobody"}, 404, "no session 'nobody'"),
        ({"session": 5}, 400, "session"),
        ({"session": ""}, 404, "no session ''; it may have ended. Open another one."),
        ({"session": "x" * 10_000}, 404, f"no session '{'x' * 200}'; it may"),
    ):
        body = {"prompt": "a", "session": session} | options
        answered, message = refused(server, "/v1/completions", **body)
        assert (answered, word in message) == (status, True), message
    chat = {"messages": [{"role": "user", "content": "hi"}], "session": session}
    assert "for /v1/completions" in refused(server, "/v1/chat/completions", **chat)[1]
    assert len(say(server, session, "and now")["choices"]) == 1, "it has survived all that"
    delete(server, session)


def leave_early(server: Server, session: str) -> Any:
    """The answer to the last of three inputs, whose first client leaves in the middle of 400 tokens."""
    stream = server.stream("/v1/completions", prompt=[7] * 5, session=session, **(GREEDY | {"max_tokens": 400}))
    next(stream)
    waits = server.stream("/v1/completions", prompt=[8] * 5, session=session, **GREEDY)
    with ThreadPoolExecutor() as pool:
        gone = pool.submit(next, waits, None)
        last = pool.submit(say, server, session, [9] * 5)
        time.sleep(0.1)
        stream.close()  # type: ignore[attr-defined]
        answer = last.result()
        assert gone.result()
    return answer


def test_a_client_that_goes_away_takes_its_own_answer_with_it(server: Server):
    for _ in range(6):  # on a busy machine the first answer may have ended before its client left
        session = open_session(server)
        answer = leave_early(server, session)
        if answer["usage"]["prompt_tokens"] < 300:
            break
        delete(server, session)
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["prompt_tokens"] < 300
    end = time.monotonic() + 10  # who of the two came first is not known
    while server.state()["idle"] != [session]:
        assert time.monotonic() < end
    delete(server, session)
    server.wait_empty()


def test_input_is_taken_up_in_the_order_in_which_it_came(server: Server, llm: LLM):
    """Though a long text takes longer to tokenize."""
    long = "word " * 60
    for _ in range(5):
        session = open_session(server)
        with ThreadPoolExecutor() as pool:
            first = pool.submit(say, server, session, long)
            time.sleep(0.004)
            second = pool.submit(say, server, session, "b")
        assert (
            second.result()["usage"]["prompt_tokens"]
            == len(long) + 6 + 1
            == first.result()["usage"]["prompt_tokens"] + 7
        )
        delete(server, session)


def test_sessions_end_by_time_and_are_bounded_in_number(tiny_model: Path):
    with pytest.raises(UserError, match="session_timeout"):
        ServeConfig(session_timeout=0.0)
    options = ("--num-blocks", "60", "--session-timeout", "0.5", "--max-num-seqs", "2", "--max-waiting", "1")
    with Server(tiny_model, *options) as server:
        sessions = [open_session(server) for _ in range(3)]
        assert refused(server, "/v1/sessions") == (
            429,
            "3 sessions are open: that is the limit. End one, or try later.",
        )
        say(server, sessions[0], "hello")
        assert server.state()["idle"] == sessions[:1]
        time.sleep(0.6)
        assert server.state()["idle"] == [], "held until somebody asks"
        assert refused(server, "/v1/completions", prompt="x", session=sessions[0])[0] == 404
        assert open_session(server)
