"""What the API answers: to good requests, to bad ones, to many at once, and to clients that go away. One real server."""

import json
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nanopd import LLM, SamplingParams
from tests.serve.conftest import Server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
KEY = {"Authorization": "Bearer secret"}
OPTIONS = ("--num-blocks", "300", "--dtype", "float32", "--check-invariants")
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), dtype="float32", num_blocks=300)


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").wait_empty()


def offline(llm: LLM, prompt: Any, **options: Any) -> Any:
    return llm.generate([prompt], SamplingParams(**(GREEDY | options)))[0].outputs[0]


# ---------------------------------------------------------------- good requests


def test_a_completion(server: Server, llm: LLM):
    answer = server.post(COMPLETIONS, prompt="hello there", model="tiny-llama", **GREEDY)
    expected = offline(llm, "hello there")
    assert answer["choices"] == [
        {"index": 0, "text": expected.text, "finish_reason": "length", "stop_reason": None, "logprobs": None}
    ]
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny-llama")
    assert abs(answer["created"] - time.time()) < 60
    assert answer["usage"]["prompt_tokens"] == 11
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["usage"]["total_tokens"] == 19
    metrics = answer["metrics"]
    assert 0 <= metrics["queue_time"] <= metrics["time_to_first_token"] <= metrics["e2e_latency"]
    assert [status for _, status in metrics["history"]] == ["waiting", "running", "length"]
    assert "kv_transfer_params" not in answer


def test_a_chat_completion(server: Server, llm: LLM):
    answer = server.post(CHAT, messages=HI, **GREEDY)
    expected = llm.chat(HI, SamplingParams(**GREEDY))[0].outputs[0].text
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": expected}
    assert answer["object"] == "chat.completion"
    parts = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}], "name": "x"}]
    assert server.post(CHAT, messages=parts, **GREEDY)["choices"] == answer["choices"]
    long = server.post(CHAT, messages=HI, temperature=0, ignore_eos=True)["usage"]
    assert long["total_tokens"] == 512, "without max_tokens a chat may use all of max_model_len"


def test_the_second_time_the_prompt_is_cached(server: Server):
    prompt = "a prompt that is a good deal longer than two blocks of sixteen tokens"
    answers = [server.post(COMPLETIONS, prompt=prompt, **GREEDY) for _ in range(2)]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers] == [0, 64]
    other = server.post(COMPLETIONS, prompt=prompt, cache_salt="mine", **GREEDY)
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_streams_say_the_same(server: Server):
    for path, question in ((COMPLETIONS, {"prompt": "stream"}), (CHAT, {"messages": HI})):
        options = GREEDY | question | {"max_tokens": 30, "logprobs": True if path == CHAT else 2}
        whole = server.post(path, **options)
        events = list(server.stream(path, stream_options={"include_usage": True}, **options))
        *chunks, usage = events
        assert len({event["id"] for event in events}) == 1
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 30
        assert all(chunk["usage"] is None for chunk in chunks)
        choices = [chunk["choices"][0] for chunk in chunks]
        assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["length"]
        assert ["metrics" in chunk for chunk in chunks] == [False] * (len(choices) - 1) + [True]
        assert len(choices) > 10, "it comes in pieces"
        (expected,) = whole["choices"]
        if path == CHAT:
            assert choices[0]["delta"]["role"] == "assistant"
            assert "role" not in choices[1]["delta"]
            assert "".join(c["delta"]["content"] for c in choices) == expected["message"]["content"]
            content = [entry for c in choices for entry in c["logprobs"]["content"]]
            assert [e["token"] for e in content] == [e["token"] for e in expected["logprobs"]["content"]]
        else:
            assert "".join(c["text"] for c in choices) == expected["text"]
            for field in ("tokens", "text_offset"):
                assert [x for c in choices for x in c["logprobs"][field]] == expected["logprobs"][field]
    without = list(server.stream(COMPLETIONS, prompt="stream", **GREEDY))
    assert all("usage" not in event and event["choices"] for event in without)


def test_logprobs(server: Server, llm: LLM):
    expected = offline(llm, "logprobs", logprobs=2)
    got = server.post(COMPLETIONS, prompt="logprobs", logprobs=2, **GREEDY)["choices"][0]["logprobs"]
    chosen = [entry[t] for t, entry in zip(expected.token_ids, expected.logprobs)]
    assert got["tokens"] == [p.decoded_token for p in chosen]
    assert got["token_logprobs"] == pytest.approx([p.logprob for p in chosen], abs=1e-3)
    assert got["text_offset"] == [sum(len(t) for t in got["tokens"][:i]) for i in range(8)]
    assert all(1 <= len(top) <= 2 for top in got["top_logprobs"])
    assert server.post(COMPLETIONS, prompt="logprobs", logprobs=0, **GREEDY)["choices"][0]["logprobs"]["tokens"]

    options: dict[str, Any] = {"messages": HI, "temperature": 40.0, "seed": 3, "max_tokens": 12, "ignore_eos": True}
    for num_top in (0, 3):
        answer = server.post(CHAT, logprobs=True, top_logprobs=num_top, **options)
        content = answer["choices"][0]["logprobs"]["content"]
        assert len(content) == 12
        assert all(len(entry["top_logprobs"]) == num_top for entry in content)
        assert all(e["bytes"] is None or bytes(e["bytes"]).decode() == e["token"] for e in content)
    assert any(e["token"] not in [t["token"] for t in e["top_logprobs"]] for e in content), "drawn from far outside"


def test_several_prompts_and_several_completions(server: Server, llm: LLM):
    answer = server.post(
        COMPLETIONS, prompt=["one", "two"], n=2, seed=5, temperature=1.0, max_tokens=6, ignore_eos=True
    )
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    params = SamplingParams(n=2, seed=5, temperature=1.0, max_tokens=6, ignore_eos=True)
    expected = [c.text for output in llm.generate(["one", "two"], params) for c in output.outputs]
    assert [c["text"] for c in answer["choices"]] == expected
    assert answer["usage"]["prompt_tokens"] == 6
    assert answer["usage"]["completion_tokens"] == 24
    ids = [llm.tokenizer.encode("one"), llm.tokenizer.encode("two")]
    for prompt, count in ((ids, 2), (ids[0], 1), ("one", 1), (["one"], 1)):
        choices = server.post(COMPLETIONS, prompt=prompt, **GREEDY)["choices"]
        assert choices[0]["text"] == offline(llm, "one").text
        assert len(choices) == count
    texts = [""] * 4
    for event in server.stream(COMPLETIONS, prompt=["one", "two"], n=2, seed=5, max_tokens=6, ignore_eos=True):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == expected


def test_sampling_options_reach_the_engine(server: Server, llm: LLM):
    plain = offline(llm, "stop test", max_tokens=12)
    stop = plain.text[3:5]
    for wish in (stop, [stop]):
        (choice,) = server.post(COMPLETIONS, prompt="stop test", **GREEDY | {"max_tokens": 12, "stop": wish})["choices"]
        assert choice["text"] == plain.text[: plain.text.index(stop)]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    token = plain.token_ids[4]
    (choice,) = server.post(COMPLETIONS, prompt="stop test", stop_token_ids=[token], **GREEDY)["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token)
    sampled = {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 1, "repetition_penalty": 1.2}
    sampled |= {"presence_penalty": 0.5, "frequency_penalty": 0.5, "min_tokens": 8}
    (choice,) = server.post(COMPLETIONS, prompt="x", **GREEDY | sampled)["choices"]
    assert choice["text"] == offline(llm, "x", **sampled).text


def test_null_is_the_default_and_harmless_fields_are_ignored(server: Server):
    plain = server.post(COMPLETIONS, prompt="x", temperature=0)
    assert plain["usage"]["completion_tokens"] <= 16
    nulls = dict.fromkeys(
        ("max_tokens", "stop", "logprobs", "seed", "n", "stream", "stream_options", "suffix", "tools")
    )
    nulls |= {"user": "me", "metadata": {"a": 1}, "store": False, "service_tier": "auto", "parallel_tool_calls": True}
    nulls |= {
        "echo": False,
        "logit_bias": {},
        "best_of": 1,
        "kv_transfer_params": {},
        "response_format": {"type": "text"},
    }
    assert server.post(COMPLETIONS, prompt="x", temperature=0, **nulls)["choices"] == plain["choices"]
    assert server.post(CHAT, messages=HI, max_completion_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3


def test_request_ids(server: Server):
    _, answer, headers = server.request(COMPLETIONS, {"prompt": "x"} | GREEDY, {"X-Request-Id": "abc 1"})
    assert (headers["X-Request-Id"], answer["id"]) == ("abc 1", "cmpl-abc 1")
    _, answer, headers = server.request(CHAT, {"messages": HI} | GREEDY)
    assert answer["id"] == "chatcmpl-" + headers["X-Request-Id"]
    assert len(headers["X-Request-Id"]) == 36
    for bad in ("x" * 201, "tab\there", "caf\xe9"):
        status, answer, headers = server.request(COMPLETIONS, {"prompt": "x"} | GREEDY, {"X-Request-Id": bad})
        assert status == 400
        assert "X-Request-Id" in answer["error"]["message"]
    with ThreadPoolExecutor(8) as pool:  # one id for many at once: each is answered
        ask = lambda i: server.post(COMPLETIONS, {"X-Request-Id": "same"}, prompt="same", **GREEDY)  # noqa: E731
        answers = list(pool.map(ask, range(8)))
    assert len({json.dumps(answer["choices"]) for answer in answers}) == 1


def test_the_engine_has_the_id_of_the_header(server: Server):
    stream = server.stream(COMPLETIONS, {"X-Request-Id": "seen"}, prompt="x" * 20, **GREEDY | {"max_tokens": 400})
    next(stream)
    state = server.state()
    assert state["running"] == ["seen"]
    assert state["requests"]["seen"]["status"] == "running"
    assert state["requests"]["seen"]["num_tokens"] > state["requests"]["seen"]["num_computed_tokens"] > 20
    assert state["free_blocks"] < state["num_blocks"] == 300
    stream.close()


def test_models_health_and_metrics(server: Server):
    _, models, _ = server.request("/v1/models")
    assert [(m["id"], m["object"], m["max_model_len"]) for m in models["data"]] == [("tiny-llama", "model", 512)]
    time.sleep(0.1)  # the stats come from the engine core a moment after /debug/state
    status, health, _ = server.request("/health")
    assert status == 200
    none = {"role": None, "num_running": 0, "num_waiting": 0, "kv_host": None, "kv_port": None}
    assert health == {"status": "ok", "model": "tiny-llama"} | none

    def metric(name: str) -> float:
        match = re.search(rf"^nanopd:{re.escape(name)} (.*)$", server.request("/metrics")[1], re.M)
        assert match, name
        return float(match[1])

    before = {
        n: metric(n) for n in ("prompt_tokens_total", "generation_tokens_total", "e2e_request_latency_seconds_count")
    }
    server.post(COMPLETIONS, prompt="12345", **GREEDY)
    time.sleep(0.2)
    assert metric("prompt_tokens_total") == before["prompt_tokens_total"] + 5
    assert metric("generation_tokens_total") == before["generation_tokens_total"] + 8
    assert metric("e2e_request_latency_seconds_count") == before["e2e_request_latency_seconds_count"] + 1
    assert metric('requests_total{finish_reason="length"}') >= 1
    for name in ("num_requests_running", "num_requests_waiting", "num_requests_loading", "num_requests_reclaiming"):
        assert metric(name) == 0
    assert metric("prefix_cache_queries_total") > 0
    for name in (
        "kv_cache_usage",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "kv_transfer_sent_bytes_total",
        "cascade_saved_tokens_total",
    ):
        assert metric(name) >= 0
    for name in ("time_to_first_token", "inter_token_latency"):
        assert metric(f"{name}_seconds_sum") > 0


# ---------------------------------------------------------------- bad requests

BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    *(
        ({name: value}, name)
        for name in ("temperature", "top_p", "min_p", "repetition_penalty")
        for value in ("1", [], -1)
    ),
    *(
        ({name: value}, name)
        for name in ("max_tokens", "n", "min_tokens", "logprobs")
        for value in ("1", 1.5, True, -1)
    ),
    *(
        ({name: value}, name)
        for name in ("top_k", "seed", "presence_penalty", "frequency_penalty")
        for value in ("1", {})
    ),
    *(({name: 1}, name) for name in ("stream", "ignore_eos", "skip_special_tokens", "cache_salt", "model")),
    *(({"stop": value}, "stop") for value in (1, [1], [""], {}, [["x"]])),
    *(({"stop_token_ids": value}, "stop_token_ids") for value in ("x", ["x"], [10**9], [-5], [1.5])),
    *(({"prompt": value}, "prompt") for value in (1, {}, True)),
    *(({"prompt": value}, "") for value in ([1.5], [-1], [300], [[1], "x", 3], [["a"]], [None], [True], [[[1]]])),
    *(({"prompt": value}, "empty") for value in ("", [], [[]], ["x", ""])),
    *(
        ({"kv_transfer_params": value}, "kv_transfer_params")
        for value in (1, "x", {"do_remote_decode": "yes"}, {"transfer_id": 257 * "x"})
    ),
    *(({"kv_transfer_params": {"do_remote_decode": True}}, "--role") for _ in (1,)),
    *(
        ({name: value}, name)
        for name, value in {"suffix": "x", "echo": True, "best_of": 3, "logit_bias": {"5": 1}}.items()
    ),
    *(({name: [{"type": "function"}]}, name) for name in ("tools", "functions")),
    *(({"response_format": f}, "response_format") for f in ("json", 5, {}, {"type": "xml"}, {"type": "json_schema"})),
    *(({"structured_outputs": value}, "structured_outputs") for value in (5, {}, {"regex": "a", "choice": ["b"]})),
    *(({"structured_outputs": {"regex": "("}}, "unclosed group") for _ in (1,)),
    *(
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "Unimplemented")
        for _ in (1,)
    ),
    *(({"max_tokens": 0}, "max_tokens") for _ in (1,)),
    *(({"min_tokens": 9}, "min_tokens") for _ in (1,)),
    *(({"n": 129}, "n is 129") for _ in (1,)),
    *(({"prompt": ["x"] * 200}, "limit is 164") for _ in (1,)),
    *(({"stream_options": 5}, "stream_options") for _ in (1,)),
    *(({"no_such_field": 5}, "no_such_field") for _ in (1,)),
    *(({"messages": HI}, "messages") for _ in (1,)),
    *(({"prompt": "x" * 512}, "at most 511 tokens") for _ in (1,)),
    *(({"prompt": [5] * 600}, "at most 511 tokens") for _ in (1,)),
    *(({"prompt": "half a pair: \ud800"}, "") for _ in (1,)),
    *(({"top_logprobs": 2}, "top_logprobs") for _ in (1,)),
]
BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    *(({"messages": value}, "messages") for value in ("x", 1, [1], [{}], [{"role": "user"}], [{"content": "x"}])),
    *(({"messages": [{"role": "user", "content": c}]}, "content") for c in (1, [1], [{"type": "image_url"}], {})),
    *(({"logprobs": value}, "logprobs") for value in (1, "x")),
    *(({"logprobs": True, "top_logprobs": value}, "logprobs") for value in (-1, "x", 101)),
    *(({"top_logprobs": 2}, "logprobs") for _ in (1,)),
    *(({"prompt": "x"}, "prompt") for _ in (1,)),
    *(({"messages": [{"role": "user", "content": "x" * 600}]}, "at most 511 tokens") for _ in (1,)),
]


def check_error(answer: Any, says: str = "") -> None:
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert says in answer["error"]["message"], answer
    assert "Traceback" not in answer["error"]["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_fields_that_are_wrong(server: Server, path: str):
    plain: dict[str, Any] = {"prompt": "x"} if path == COMPLETIONS else {"messages": HI}
    for fields, says in BAD_FIELDS if path == COMPLETIONS else BAD_CHATS:
        for stream in (False, True):
            status, answer, _ = server.request(path, plain | {"max_tokens": 4, "stream": stream} | fields)
            assert status == 400, (fields, answer)
            check_error(answer, says)
            assert answer["error"]["type"] == "invalid_request_error"
    status, answer, _ = server.request(path, plain | {"model": "gpt-9"})
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "model_not_found", "model")


BAD_BODIES = [b"", b"{", b"[]", b"3", b"null", b'"x"', b'{"prompt": "\xff\xfe"}', b'{"prompt": "x", }', b"\x00" * 99]
BAD_BODIES += [b"[" * 100_000, b'{"prompt": ' + b"[" * 100_000, b'{"prompt": "x", "max_tokens": 1' + b"0" * 99]
BAD_BODIES += [b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "x", "temperature": 1e999}']
BAD_BODIES += [b'{"prompt": "x", "seed": 123456789012345678901234567890}']


@pytest.mark.parametrize("body", BAD_BODIES)
def test_bodies_that_are_wrong(server: Server, body: bytes):
    for path in (COMPLETIONS, CHAT):
        status, answer, _ = server.request(path, body)
        assert status == 400
        check_error(answer)


def test_a_body_that_is_too_large_or_not_what_it_says(server: Server):
    status, answer, _ = server.request(COMPLETIONS, b'{"prompt": "' + b"x" * 10 * 2**20 + b'"}')
    assert status == 413
    check_error(answer)
    status, answer, _ = server.request(COMPLETIONS, b"not gzip", {"Content-Encoding": "gzip"})
    assert status == 400
    check_error(answer)


def test_pages_that_are_not_there(server: Server):
    for path, body, status in (
        ("/nope", None, 404),
        ("/v1/nope", {}, 404),
        (COMPLETIONS, None, 405),
        ("/health", {}, 405),
    ):
        got, answer, headers = server.request(path, body)
        assert got == status
        check_error(answer)
        assert "X-Request-Id" in headers


# ---------------------------------------------------------------- clients as they are


def send_head(server: Server, path: str, length: int) -> socket.socket:
    connection = socket.create_connection(server.address, timeout=30)
    connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode())
    return connection


def test_half_a_request_holds_nobody_up(server: Server):
    half = [socket.create_connection(server.address) for _ in range(20)]
    for i, connection in enumerate(half):
        connection.sendall((b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99\r\n\r\n{")[i % 2])
    assert server.post(COMPLETIONS, prompt="x", **GREEDY)["choices"]
    opens = socket.create_connection(server.address)
    opens.sendall(b"POST /v1/sessions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
    for connection in (*half, opens):
        connection.close()
    garbage = socket.create_connection(server.address, timeout=10)
    garbage.sendall(b"\x16\x03\x01\x02\x00\r\n\r\n")
    assert b"400" in garbage.recv(1000)
    assert server.post(COMPLETIONS, prompt="x", **GREEDY)["choices"]
    assert not any("please report" in line for line in server.stderr), "who leaves early is no mistake of ours"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_goes_away_takes_its_request_with_it(server: Server, stream: bool, n: int):
    body = json.dumps({"prompt": "bye", "stream": stream, "n": n} | GREEDY | {"max_tokens": 500}).encode()
    connection = send_head(server, COMPLETIONS, len(body))
    connection.sendall(body)
    if stream:
        assert b"200 OK" in connection.recv(1000)
    end = time.monotonic() + 10
    while len(server.state()["running"]) < n:
        assert time.monotonic() < end
    start = time.monotonic()
    connection.close()
    server.wait_empty()
    assert time.monotonic() - start < 1.5, "500 tokens would take longer"


def test_a_client_that_does_not_read_holds_nobody_up(server: Server, llm: LLM):
    body = json.dumps(
        {"prompt": "slow", "stream": True, "n": 8} | GREEDY | {"max_tokens": 250, "logprobs": 20}
    ).encode()
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect(server.address)
    slow.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    for _ in range(3):
        assert server.post(COMPLETIONS, prompt="fast", **GREEDY)["choices"][0]["text"] == offline(llm, "fast").text
    server.wait_empty(60)
    raw = b""
    slow.settimeout(20)
    while not raw.endswith(b"0\r\n\r\n"):
        raw += slow.recv(1 << 20)
    slow.close()
    assert b"[DONE]" in raw, "what it did not read in time it gets later"
    texts = [""] * 8
    for line in re.sub(rb"\r\n[0-9a-f]+\r\n", b"", raw[raw.index(b"\r\n\r\n") + 2 :]).split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                texts[choice["index"]] += choice["text"]
    assert set(texts) == {offline(llm, "slow", max_tokens=250).text}


def test_many_streams_at_once(server: Server, llm: LLM):
    prompts = [f"prompt number {i} of many" for i in range(64)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    texts: dict[int, str] = {}

    def ask(i: int) -> None:
        events = server.stream(COMPLETIONS, prompt=prompts[i], temperature=0, max_tokens=24, ignore_eos=True)
        texts[i] = "".join(event["choices"][0]["text"] for event in events)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [texts[i] for i in range(64)] == [output.outputs[0].text for output in outputs]


def test_too_many_are_refused(server: Server):
    def ask(n: int) -> tuple[int, Any, dict[str, str]]:
        return server.request(COMPLETIONS, {"prompt": "x", "n": n} | GREEDY | {"max_tokens": 60})

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(ask, 80) for _ in range(2)]  # 160 of 64 + 100
        end = time.monotonic() + 10
        while len((state := server.state())["requests"]) < 160:
            assert time.monotonic() < end
        assert len(state["running"]) <= 64
        status, answer, headers = ask(5)
        assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
        assert int(headers["Retry-After"]) >= 1
        check_error(answer)
        assert ask(1)[0] == 200
        assert [future.result()[0] for future in running] == [200, 200]
    assert ask(5)[0] == 200


def test_a_key_and_a_role(tiny_model: Path):
    with Server(
        tiny_model, *OPTIONS, "--api-key", "secret", "--served-model-name", "mine", "--role", "prefill"
    ) as server:
        for path, body in (
            ("/v1/models", None),
            (COMPLETIONS, {"prompt": "x"}),
            ("/metrics", None),
            ("/debug/state", None),
        ):
            for headers in (
                {},
                {"Authorization": "secret"},
                {"Authorization": "Bearer secre"},
                {"Authorization": "Bearer \xfc"},
            ):
                status, answer, _ = server.request(path, body, headers)
                assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
                check_error(answer)
            assert server.request(path, body, KEY)[0] == 200
        status, health, _ = server.request("/health")
        assert (status, health["status"], health["model"], health["role"]) == (200, "ok", "mine", "prefill")
        assert health["kv_host"] == "127.0.0.1"
        assert health["kv_port"] > 0

        def ask(**wish: Any) -> tuple[int, Any]:
            body = {"prompt": "a prompt of more than a block", "max_tokens": 1, "kv_transfer_params": wish}
            status, answer, _ = server.request(COMPLETIONS, body, KEY | {"X-Request-Id": "both-sides"})
            return status, answer

        status, answer = ask(do_remote_decode=True, do_remote_prefill=False, remote_host=None, remote_block_ids=None)
        assert status == 200
        transfer = answer["kv_transfer_params"]
        assert (transfer["do_remote_prefill"], transfer["transfer_id"]) == (True, "both-sides")
        assert transfer["remote_port"] == health["kv_port"]
        assert server.state(KEY)["reclaiming"] == ["both-sides"]
        assert ask(do_remote_decode=True, transfer_id="other")[0] == 200, (
            "an id whose blocks are held can be used again"
        )
        assert ask()[0] == 200
        status, answer = ask(do_remote_prefill=True, remote_host="127.0.0.1", remote_port=1)
        assert status == 400
        check_error(answer, "--role decode")
        body = {"prompt": ["x", "y"], "kv_transfer_params": {"do_remote_decode": True}}
        status, answer, _ = server.request(COMPLETIONS, body, KEY)
        assert status == 400
        check_error(answer, "one prompt")


def test_a_wait_for_a_body_ends(server: Server, tiny_model: Path):
    """READ_TIMEOUT is 30 seconds; here we look only that a slow body is not cut short before."""
    body = json.dumps({"prompt": "drip"} | GREEDY).encode()
    connection = send_head(server, COMPLETIONS, len(body))
    for i in range(0, len(body), 20):
        connection.sendall(body[i : i + 20])
        time.sleep(0.1)
    assert b"200 OK" in connection.recv(1000)
    connection.close()
    assert urllib.request.urlopen(server.base_url + "/health", timeout=5).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_on_request(server: Server, stream: bool):
    """vLLM's return_token_ids: for clients that want to compare more than text."""
    wish: dict[str, Any] = {"prompt": [104, 101, 108], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    if stream:
        chunks = list(server.stream("/v1/completions", **wish, return_token_ids=True))
        answer = chunks[-1] | {"token_ids": [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]]}
    else:
        answer = server.post("/v1/completions", **wish, return_token_ids=True)
        answer |= {"token_ids": answer["choices"][0]["token_ids"]}
    assert answer["prompt_token_ids"] == [104, 101, 108]
    assert len(answer["token_ids"]) == 6
    plain = server.post("/v1/completions", **wish)
    assert "token_ids" not in plain["choices"][0] and "prompt_token_ids" not in plain
