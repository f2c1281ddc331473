"""The router against nodes that do what nodes do at their worst: refuse, answer late, break off, freeze, come back.

The nodes are made here and record what they get; sockets are real. Rules P6, P7 and P8.
"""

import asyncio
import contextlib
import functools
import json
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from nanopd.config import UserError
from nanopd.serve import router as router_module
from nanopd.serve.router import Node, Router, RouterConfig, chain, one_completion, route

PROMPT = {"prompt": "Once upon a time", "max_tokens": 9}
STREAM = PROMPT | {"stream": True}
PIECES = [b'data: {"n": 1}\n\n', b'data: {"n": 2}\n\n', b"data: [DONE]\n\n"]


def aio(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test in a loop of its own. What must be so first is waited for (`until`, `Fake.when`): delays are no order.

    The time is there for what never ends; a machine that is busy with other tests needs a multiple of what is usual.
    """

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 60))

    return run


@dataclass
class Fake:
    """A node. `act` says what it does with a completion: a status, or how it misbehaves."""

    role: str | None = "decode"
    act: int | str = 200  # a status; "break": dies before, "break mid": after the first piece; "freeze", "freeze mid"
    delay: float = 0.0  # before the answer's first byte
    when: Callable[[], Any] = lambda: True  # no answer before this is so
    gap: float = 0.0  # between pieces
    health: int | str = 200
    got: list[dict[str, Any]] = field(default_factory=list)
    headers: list[Any] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    num_health: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application(client_max_size=2**26)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._complete),
                web.post("/v1/chat/completions", self._complete),
            ]
        )
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()
        self.port = self.runner.addresses[0][1]

    async def stop(self) -> None:
        await self.runner.cleanup()

    async def _health(self, http: web.Request) -> web.Response:
        self.num_health += 1
        if self.health == "freeze":
            await asyncio.sleep(60)
        if self.health == "garbage":
            return web.json_response([1])
        state = {"status": "ok", "role": self.role, "kv_host": "10.0.0.1", "kv_port": self.port + 1}
        return web.json_response(state, status=int(self.health))

    async def _models(self, http: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.url}]})

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        self.got.append(body)
        self.headers.append(http.headers)
        self.log.append("asked")
        try:
            return await self._answer(http, body)
        except (asyncio.CancelledError, ConnectionResetError):
            self.log.append("closed")
            raise
        finally:
            self.log.append("end")

    async def _answer(self, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        assert http.transport
        await asyncio.sleep(self.delay)
        await until(self.when, 60)
        if self.act == "break":
            http.transport.abort()
        if self.act == "freeze":
            await asyncio.sleep(60)
        if isinstance(self.act, int) and self.act != 200:
            content = {"message": f"{self.act} of {self.role}", "type": "x", "param": None, "code": None}
            return web.json_response({"error": content}, status=self.act)
        if not body.get("stream") and self.act == 200:
            kv = {"from_p": body["kv_transfer_params"]["transfer_id"]} if self.role == "prefill" else None
            return web.json_response({"text": "and they lived", "by": self.url, "kv_transfer_params": kv})
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(http)
        for i, piece in enumerate(PIECES):
            await answer.write(piece)
            if self.act == "break mid":
                await asyncio.sleep(0.02)
                http.transport.abort()
            if self.act == "freeze mid":
                await asyncio.sleep(60)
            await asyncio.sleep(self.gap if i < len(PIECES) - 1 else 0)
        return answer


class Client:
    """Asks the router."""

    def __init__(self, url: str, router: Router, session: aiohttp.ClientSession) -> None:
        self.url, self.router, self.session = url, router, session

    async def post(self, body: Any, path: str = "/v1/completions", **kwargs: Any) -> tuple[int, bytes, Any]:
        kwargs |= {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.session.post(self.url + path, **kwargs) as response:
            return response.status, await response.read(), response.headers

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.json()

    def node(self, fake: Fake) -> Node:
        return self.router.nodes[fake.url]


@contextlib.asynccontextmanager
async def routing(prefill: list[Fake], decode: list[Fake], down: tuple[Fake, ...] = (), **options: Any) -> Any:
    """A router over these nodes; those in `down` have stopped after the router has seen them, and refuse connections."""
    fakes = list({id(fake): fake for fake in (*prefill, *decode)}.values())
    for fake in fakes:
        await fake.start()
    options = {"health_interval": 30.0} | options
    config = RouterConfig(tuple(f.url for f in prefill), tuple(f.url for f in decode), **options)
    router = Router(config)
    runner = web.AppRunner(router.app, handler_cancellation=True, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    for fake in down:
        await fake.stop()
    try:
        async with aiohttp.ClientSession() as session:
            yield Client(f"http://127.0.0.1:{runner.addresses[0][1]}", router, session)
    finally:
        await runner.cleanup()
        for fake in fakes:
            await fake.stop()
        assert all(not node.calls for node in router.nodes.values()), "a request was counted and never given back"


async def until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to this"
        await asyncio.sleep(0.01)


def params(fake: Fake, i: int = -1) -> dict[str, Any] | None:
    return fake.got[i].get("kv_transfer_params")


# ---------------------------------------------------------------- a request's way


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
@aio
async def test_p_and_d_are_told_of_each_other(path, stream):
    p, d = Fake("prefill"), Fake()
    body = {"stream": stream, "max_tokens": 9, "min_tokens": 3, "temperature": 0.5}
    body |= {"prompt": "Hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    if stream:
        body |= {"stream_options": {"include_usage": True}, "max_completion_tokens": 9}
    evil = {"do_remote_prefill": True, "remote_host": "evil", "remote_port": 1, "transfer_id": "mine"}
    async with routing([p], [d]) as client:
        for _ in range(2):
            headers = {"X-Request-Id": "mine"}
            status, answer, _ = await client.post(body | {"kv_transfer_params": evil}, path, headers=headers)
            assert status == 200
            assert answer == b"".join(PIECES) if stream else json.loads(answer)["by"] == d.url
    ids = [params(p, i)["transfer_id"] for i in range(2)]
    assert len({*ids, "mine"}) == 3  # an id used twice, or a client's, is never a transfer's
    dropped = ("stream_options", "min_tokens", "max_completion_tokens")
    for i in range(2):
        to_p = {k: v for k, v in body.items() if k not in dropped} | {"max_tokens": 1, "stream": False}
        assert p.got[i] == to_p | {"kv_transfer_params": {"do_remote_decode": True, "transfer_id": ids[i]}}
        where = {"remote_host": "10.0.0.1", "remote_port": p.port + 1}
        assert d.got[i] == body | {"kv_transfer_params": {"do_remote_prefill": True, "transfer_id": ids[i]} | where}
        assert p.headers[i]["X-Request-Id"] == d.headers[i]["X-Request-Id"] == "mine"


@aio
async def test_together_asks_d_while_p_computes():
    p, d = Fake("prefill"), Fake()
    p.when = d.when = lambda: p.got and d.got  # neither answers before both are asked
    async with routing([p], [d]) as client:
        assert (await client.post(STREAM))[1] == b"".join(PIECES)


@aio
async def test_prefill_first_asks_d_with_what_p_returned():
    p, d = Fake("prefill", delay=0.1), Fake()
    async with routing([p], [d], order="prefill_first") as client:
        asking = asyncio.create_task(client.post(STREAM))
        await until(lambda: p.got)
        assert not d.got or "end" in p.log
        assert (await asking)[1] == b"".join(PIECES)
    assert p.log == ["asked", "end"]
    assert params(d) == {"from_p": params(p)["transfer_id"]}


@aio
async def test_a_stream_is_passed_on_as_it_comes():
    d = Fake(gap=0.5)
    async with routing([], [d]) as client, client.session.post(client.url + "/v1/completions", json=STREAM) as answer:
        assert answer.content_type == "text/event-stream"
        assert await answer.content.readany() == PIECES[0]
        assert d.log == ["asked"]
        assert await answer.content.read() == b"".join(PIECES[1:])


ALONE: dict[str, tuple[list[Fake], list[Fake], dict[str, Any]]] = {
    "no P": ([], [Fake()], PROMPT),
    "P is not ready": ([Fake("prefill", health=503)], [Fake()], PROMPT),
    "P is no P": ([Fake("decode")], [Fake()], PROMPT),
    "D has no connector": ([Fake("prefill")], [Fake(None)], PROMPT),
    "two completions": ([Fake("prefill")], [Fake()], PROMPT | {"n": 2}),
    "two prompts": ([Fake("prefill")], [Fake()], {"prompt": ["a", "b"]}),
    "two prompts of ids": ([Fake("prefill")], [Fake()], {"prompt": [[1, 2], [3]]}),
}


@pytest.mark.parametrize("case", ALONE)
@pytest.mark.parametrize("order", ["together", "prefill_first"])
@aio
async def test_d_alone(case, order):
    prefill, decode, body = ALONE[case]
    ps, ds = ([Fake(f.role, health=f.health) for f in fakes] for fakes in (prefill, decode))
    async with routing(ps, ds, order=order) as client:
        assert (await client.post(body | {"kv_transfer_params": {"remote_host": "evil"}}))[0] == 200
    assert not any(p.got for p in ps)
    assert ds[0].got == [body]


@aio
async def test_a_node_in_both_lists_is_never_its_own_p():
    a, b = Fake("both"), Fake("both")
    async with routing([a], [a]) as client:
        assert (await client.post(PROMPT))[0] == 200
        assert a.got == [PROMPT]
    a = Fake("both")
    async with routing([a, b], [a, b]) as client:
        assert (await client.post(PROMPT))[0] == 200
        assert {len(a.got), len(b.got)} == {1}


@pytest.mark.parametrize(
    ("body", "one"),
    [
        ({"prompt": "a"}, True),
        ({"prompt": ["a"]}, True),
        ({"prompt": [1, 2]}, True),
        ({"prompt": []}, True),
        ({"messages": [{}, {}], "n": None}, True),
        ({"prompt": ["a", "b"]}, False),
        ({"prompt": [[1], [2]]}, False),
        ({"prompt": "a", "n": 2}, False),
        ({}, False),
    ],
)
def test_one_completion(body, one):
    assert one_completion(body) is one


# ---------------------------------------------------------------- P fails


FAILURES = ["refuse", "break", 429, 500, 503]


@pytest.mark.parametrize("order", ["together", "prefill_first"])
@pytest.mark.parametrize("how", FAILURES)
@pytest.mark.parametrize("stream", [False, True])
@aio
async def test_p_fails_and_another_takes_over(how, order, stream):
    """P6, P8: the failed P's transfer is never waited for: D is asked anew, with another id and the other P."""
    bad, good = Fake("prefill", how), Fake("prefill")
    d = Fake(when=lambda: good.got)
    down = (bad,) if how == "refuse" else ()
    async with routing([bad, good], [d], down, order=order, policy="round_robin") as client:
        status, answer, _ = await client.post(PROMPT | {"stream": stream})
        assert status == 200
        assert answer == b"".join(PIECES) if stream else b"lived" in answer
        assert bool(client.node(bad).health) is (how in (429, 500))  # those two are no sign of a dead node
    assert len(bad.got) == (how != "refuse") and len(good.got) == 1
    if order == "together":
        assert params(d)["remote_port"] == good.port + 1
        assert params(d)["transfer_id"] == params(good)["transfer_id"]
        assert d.log.count("closed") == len(d.got) - 1  # what it was asked before has been taken back
    else:
        assert len(d.got) == 1 and params(d) == {"from_p": params(good)["transfer_id"]}
    if bad.got:
        assert params(bad)["transfer_id"] != params(good)["transfer_id"]


@pytest.mark.parametrize("order", ["together", "prefill_first"])
@pytest.mark.parametrize("how", FAILURES)
@aio
async def test_every_p_fails_and_d_computes_alone(how, order):
    ps, d = [Fake("prefill", how), Fake("prefill", how)], Fake()
    d.when = lambda: d.got[-1] == PROMPT
    async with routing(ps, [d], tuple(ps) if how == "refuse" else (), order=order) as client:
        assert (await client.post(PROMPT))[0] == 200
    assert d.got[-1] == PROMPT
    assert all(len(p.got) == (how != "refuse") for p in ps)


@aio
async def test_p_fails_after_d_has_begun():
    p, d = Fake("prefill", "break", delay=1.0), Fake(gap=0.6)
    async with routing([p], [d]) as client:
        assert (await client.post(STREAM))[1] == b"".join(PIECES)
    assert len(d.got) == 1


@pytest.mark.parametrize("order", ["together", "prefill_first"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("status", [400, 404])
@aio
async def test_a_clients_mistake_is_passed_through(status, side, order):
    ps, ds = [Fake("prefill"), Fake("prefill")], [Fake(), Fake()]
    for fake in ps if side == "prefill" else ds:
        fake.act = status
    for fake in ds if side == "prefill" else ps:
        fake.when = lambda: order == "prefill_first"  # else it is taken back before it can answer
    async with routing(ps, ds, order=order) as client:
        got, answer, _ = await client.post(STREAM)
        assert got == status
        assert json.loads(answer)["error"]["message"] == f"{status} of {side}"
        assert (await client.get("/health"))[0] == 200
    assert sum(len(p.got) for p in ps) == 1 and sum(len(d.got) for d in ds) <= 1


# ---------------------------------------------------------------- D fails


@pytest.mark.parametrize("how", [*FAILURES, "break mid"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("order", ["together", "prefill_first"])
@aio
async def test_d_fails_before_the_first_byte_and_another_takes_over(how, stream, order):
    """Without a stream nothing has been passed on as long as the answer is not whole, so `break mid` can be mended too."""
    if how == "break mid" and stream:
        return
    p, bad, good = Fake("prefill"), Fake("decode", how), Fake()
    down = (bad,) if how == "refuse" else ()
    async with routing([p], [bad, good], down, policy="round_robin", order=order) as client:
        status, answer, _ = await client.post(PROMPT | {"stream": stream})
        assert status == 200
        assert answer == b"".join(PIECES) if stream else b"lived" in answer
        assert bool(client.node(bad).health) is (how in (429, 500))
    assert len(bad.got) == (how != "refuse") and len(good.got) == 1
    if order == "together":
        assert params(good)["transfer_id"] == params(p)["transfer_id"]
    if bad.got:
        assert params(bad) != params(good)


@aio
async def test_d_breaks_off_in_the_middle_of_a_stream():
    """P8: what was passed on stays, an error event ends it, [DONE] does not come, nobody else is asked."""
    bad, good = Fake("decode", "break mid"), Fake()
    async with routing([], [bad, good], policy="round_robin") as client:
        status, answer, _ = await client.post(STREAM)
        assert status == 200
        *events, last, end = [event for event in answer.split(b"\n\n") if event or event == b""]
        assert end == b"" and events[0] + b"\n\n" == PIECES[0]
        error = json.loads(last.removeprefix(b"data: "))["error"]
        assert error["type"] == "upstream_error" and error.keys() == {"message", "type", "param", "code"}
        assert b"[DONE]" not in answer
        assert not client.node(bad).health
    assert not good.got


@pytest.mark.parametrize("how", ["freeze", "freeze mid"])
@aio
async def test_a_frozen_node_holds_nobody_up(how, monkeypatch):
    """P8: it neither answers nor closes. Its /health shows that, and the requests that wait for it are ended."""
    monkeypatch.setattr(router_module, "NODE_TIMEOUT", 1.0)
    bad, good = Fake("decode", how), Fake()
    async with routing([], [bad, good], policy="round_robin", health_interval=0.05) as client:
        asking = asyncio.create_task(client.post(STREAM))
        await until(lambda: bad.got)
        await asyncio.sleep(0.1)
        bad.health = "freeze"
        status, answer, _ = await asking
        assert status == 200
        if how == "freeze":
            assert answer == b"".join(PIECES)
        else:
            assert b"upstream_error" in answer and b"[DONE]" not in answer


@aio
async def test_a_busy_node_that_is_healthy_is_waited_for(monkeypatch):
    monkeypatch.setattr(router_module, "NODE_TIMEOUT", 0.5)
    p, d = Fake("prefill", delay=0.8), Fake(delay=1.2)
    async with routing([p], [d], health_interval=0.02) as client:
        assert (await client.post(STREAM))[1] == b"".join(PIECES)


@aio
async def test_a_draining_node_may_finish():
    d = Fake(gap=0.15)
    async with routing([], [d], health_interval=0.02) as client:
        asking = asyncio.create_task(client.post(STREAM))
        await until(lambda: d.got)
        d.health = 503
        await until(lambda: not client.node(d).health)
        assert (await asking)[1] == b"".join(PIECES)


@pytest.mark.parametrize(
    ("acts", "down", "expected"),
    [
        ((200, 200), True, 503),
        ((503, 503), False, 503),
        (("break", "break"), False, 503),
        ((500, 500), False, 500),
        ((429, 429), False, 429),
    ],
)
@aio
async def test_no_d_can_help(acts, down, expected):
    ps, ds = [Fake("prefill")], [Fake("decode", act) for act in acts]
    async with routing(ps, ds, tuple(ds) if down else ()) as client:
        for body in (PROMPT, STREAM):
            status, answer, headers = await client.post(body)
            assert status == expected if body is PROMPT else status in (expected, 503)
            assert json.loads(answer)["error"].keys() == {"message", "type", "param", "code"}
            assert int(headers["Retry-After"]) > 0
        assert down or all(1 <= len(d.got) <= 2 for d in ds)  # each at most once for a request


@aio
async def test_all_down_answers_at_once():
    d = Fake(health=503)
    async with routing([], [d]) as client:
        status, answer, headers = await client.post(PROMPT)
        assert (status, headers["Retry-After"]) == (503, "1")
        assert "No decode node is up" in json.loads(answer)["error"]["message"]
        assert (await client.get("/v1/models"))[0] == 503
    assert not d.got


# ---------------------------------------------------------------- nodes come and go


@pytest.mark.parametrize("side", ["prefill", "decode"])
@aio
async def test_a_dead_node_is_skipped_until_it_is_back(side):
    """P6: whoever had no business with it does not notice; it is tried again."""
    ps, ds = [Fake("prefill"), Fake("prefill")], [Fake(), Fake()]
    dead = (ps if side == "prefill" else ds)[0]
    async with routing(ps, ds, policy="round_robin", health_interval=0.05) as client:

        async def ups() -> list[bool]:
            return [node["up"] for node in (await client.get("/health"))[1][side]]

        assert await ups() == [True, True]
        await dead.stop()
        for _ in range(6):
            assert (await client.post(PROMPT))[0] == 200
        assert not dead.got
        assert await ups() == [False, True]
        await dead.start()
        await until(lambda: client.node(dead).health)
        for _ in range(4):
            assert (await client.post(PROMPT))[0] == 200
        assert len(dead.got) == 2
        assert await ups() == [True, True]


@aio
async def test_what_an_operator_sees(caplog):
    """Which node is down, why and when it is back; and how requests ended, on /metrics."""
    p, d = Fake("prefill"), Fake()

    async with routing([p], [d], health_interval=0.05) as client:

        async def numbers() -> dict[str, int]:
            async with client.session.get(client.url + "/metrics") as response:
                lines = [line.rsplit(" ", 1) for line in (await response.text()).splitlines()]
                return {name.removeprefix("nanopd:router_"): int(number) for name, number in lines}

        def outcomes(now: dict[str, int]) -> dict[str, int]:
            return {name.split('"')[1]: n for name, n in now.items() if name.startswith("requests_total") and n}

        assert (await client.post(PROMPT))[0] == 200
        now = await numbers()
        assert outcomes(now) == {"answered": 1} and not caplog.text
        assert now[f'node_up{{url="{p.url}"}}'] == now[f'node_up{{url="{d.url}"}}'] == 1

        p.act, d.when = 500, lambda: "kv_transfer_params" not in d.got[-1]  # D computes it
        assert (await client.post(PROMPT))[0] == 200
        assert outcomes(await numbers()) == {"answered": 2, "tries_failed": 1}
        assert f"a request failed at {p.url} (status 500)" in caplog.text

        p.when, d.when = lambda: False, lambda: True
        p.act, d.act = 200, 400
        assert (await client.post(PROMPT))[0] == 400
        assert outcomes(await numbers()) == {"answered": 2, "tries_failed": 2, "refused": 1}
        assert d.url not in caplog.text, "the client's mistake is not the node's"

        d.act, d.delay = "break mid", 0.0
        assert (await client.post(STREAM))[0] == 200
        assert outcomes(await numbers())["broken_off"] == 1
        assert f"{d.url} is down and gets no requests: it failed a request" in caplog.text
        await until(lambda: f"{d.url} is up again" in caplog.text)

        d.act, d.when, seen = 200, lambda: False, len(d.got)
        asking = asyncio.create_task(client.post(PROMPT))
        await until(lambda: len(d.got) > seen)
        asking.cancel()
        await until(lambda: client.router.counts["client_left"] == 1)

        await d.stop()
        await until(lambda: not client.node(d).health)
        assert (await client.post(PROMPT))[0] == 503
        now = await numbers()
        assert outcomes(now)["failed"] == 1 and now[f'node_up{{url="{d.url}"}}'] == 0
        assert caplog.text.count(" is down") == 2 and caplog.text.count(" is up again") == 1


@pytest.mark.parametrize("health", [503, 404, "garbage"])
@aio
async def test_health_that_is_none(health):
    d = Fake(health=health)
    async with routing([], [d], health_interval=0.02) as client:
        assert (await client.get("/health"))[0] == 503
        await until(lambda: d.num_health > 2)
        d.health = 200
        await until(lambda: client.node(d).health)
        assert (await client.post(PROMPT))[0] == 200


@aio
async def test_a_frozen_node_does_not_delay_the_look_at_others(monkeypatch):
    monkeypatch.setattr(router_module, "NODE_TIMEOUT", 30.0)
    bad, good = Fake(), Fake()
    async with routing([], [bad, good], health_interval=0.02) as client:
        bad.health, asked = "freeze", bad.num_health
        await until(lambda: bad.num_health > asked)
        seen = good.num_health
        await until(lambda: good.num_health > seen + 2)
        assert client.node(good).health and bad.num_health == asked + 1


@aio
async def test_health_shows_nodes_and_loads():
    p, d, looked = Fake("prefill"), Fake("decode"), asyncio.Event()
    p.when = d.when = looked.is_set
    async with routing([p], [d]) as client:
        asking = asyncio.create_task(client.post(PROMPT))
        await until(lambda: p.got and d.got)
        row = {"up": True, "in_flight": 1}
        expected = {"status": "ok", "prefill": [{"url": p.url} | row], "decode": [{"url": d.url} | row]}
        assert await client.get("/health") == (200, expected)
        looked.set()
        await asking
        client.node(d).health = {}
        assert (await client.get("/health"))[0] == 503


@aio
async def test_models_come_from_a_healthy_d():
    p, bad, good = Fake("prefill"), Fake(), Fake()
    async with routing([p], [bad, good], (bad,)) as client:
        for _ in range(2):
            assert await client.get("/v1/models") == (200, {"object": "list", "data": [{"id": good.url}]})
    assert not p.got


# ---------------------------------------------------------------- the client


@pytest.mark.parametrize("when", ["before", "mid"])
@pytest.mark.parametrize("stream", [False, True])
@aio
async def test_a_client_that_goes_away_takes_both_requests_with_it(when, stream):
    """P5 at the router: both connections are closed, nobody is marked down for it."""
    p, d = Fake("prefill", delay=9), Fake("decode", delay=9 if when == "before" else 0, gap=9)
    if when == "mid" and not stream:
        return
    async with routing([p], [d]) as client:
        asking = asyncio.create_task(client.post(PROMPT | {"stream": stream}))
        await until(lambda: p.got and d.got)
        await asyncio.sleep(0.1)
        asking.cancel()
        await until(lambda: "closed" in p.log and "closed" in d.log)
        assert client.node(p).health and client.node(d).health
        await until(lambda: not client.node(p).calls and not client.node(d).calls)


@aio
async def test_a_client_that_leaves_before_its_body_has_come_is_no_mistake_of_ours(caplog):
    async with routing([], [d := Fake()]) as client:
        host, port = client.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        await asyncio.sleep(0.1)
        writer.close()
        await asyncio.sleep(0.1)
        assert (await client.post(PROMPT))[0] == 200
    assert not caplog.records and len(d.got) == 1


@aio
async def test_api_key():
    """P7. It guards the router, and the nodes get it."""
    p, d = Fake("prefill"), Fake()
    async with routing([p], [d], api_key="s3crét") as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3crét"}):
            status, answer, _ = await client.post(PROMPT, headers=headers)
            assert status == 401
            assert "API key" in json.loads(answer)["error"]["message"]
        assert not p.got and not d.got
        assert (await client.get("/health"))[0] == 200
        assert (await client.get("/v1/models"))[0] == 401
        assert (await client.post(PROMPT, headers={"Authorization": "Bearer s3crét"}))[0] == 200
    assert p.headers[0]["Authorization"] == d.headers[0]["Authorization"] == "Bearer s3crét"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b"3", 400),
        (b'"prompt"', 400),
        (b"\xff\xfe", 400),
        (b"[" * 100_000, 400),
        (b'{"prompt": "' + b"a" * (8 * 2**20) + b'"}', 413),
        (b'{"prompt": "\\ud800"}', 200),
        (b'{"prompt": "' + b"a" * (8 * 2**20 - 40) + b'"}', 200),
    ],
)
@aio
async def test_bodies(body, expected):
    """P7: bounded before they are parsed, and refused in OpenAI's shape."""
    d = Fake()
    async with routing([], [d]) as client:
        status, answer, _ = await client.post(body)
        assert status == expected
        assert (json.loads(answer)["error"].keys() == {"message", "type", "param", "code"}) if status != 200 else d.got


@aio
async def test_a_body_that_does_not_come(monkeypatch):
    monkeypatch.setattr(router_module, "BODY_TIMEOUT", 0.1)
    async with routing([], [Fake()]) as client:
        host, port = client.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        assert b" 400 " in await reader.readline()
        writer.close()


@aio
async def test_other_paths_of_nodes_are_not_reached_through_the_router():
    async with routing([], [Fake()]) as client:
        for path in ("/v1/../health", "/v1/%2e%2e/health", "/v1/other", "/debug/state"):
            async with client.session.get(URL(client.url + path, encoded=True)) as response:
                assert response.status == 404


@aio
async def test_odd_request_ids_do_no_harm():
    d = Fake()
    async with routing([], [d]) as client:
        host, port = client.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps(PROMPT).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-Id: \xff\xfe\r\nConnection: close\r\n")
        writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert b" 200 " in await reader.readline() or b" 400 " in await reader.readline()
        writer.close()
        assert client.node(d).health


# ---------------------------------------------------------------- policies


def choices(policy: str, prompts: list[str], num: int = 3, loads: tuple[int, ...] = ()) -> list[int]:
    """Which of `num` nodes each prompt goes to; `loads` are there all the time."""

    async def run() -> list[int]:
        router = Router(RouterConfig(decode=tuple(f"http://{i}" for i in range(num)), policy=policy))
        for node, load in zip(router.decode, loads):
            node.calls = {asyncio.timeout(None) for _ in range(load)}
        chosen = [router.choose(router.decode, chain({"prompt": prompt})) for prompt in prompts]
        return [router.decode.index(node) for node in chosen if node]

    return asyncio.run(run())


A, B, C = ("".join(chr(ord("a") + (i * i * k) % 26) for i in range(640)) for k in (3, 5, 7))


@pytest.mark.parametrize(
    ("policy", "prompts", "loads", "expected"),
    [
        ("round_robin", [A, A, A, A], (5, 0, 0), [0, 1, 2, 0]),
        ("least_loaded", [A, A, A], (2, 0, 1), [1, 1, 1]),
        ("least_loaded", [A, A, A, A], (0, 0, 0), [0, 1, 2, 0]),
        ("prefix_aware", [A, B, C, B, A, C], (0, 0, 0), [0, 1, 2, 1, 0, 2]),
        ("prefix_aware", [A, B, A[:320] + B[:320], A + B], (0, 0, 0), [0, 1, 0, 0]),
        ("prefix_aware", [A, B, C, "short", "tiny"], (0, 0, 0), [0, 1, 2, 0, 1]),
    ],
)
def test_policies(policy, prompts, loads, expected):
    assert choices(policy, prompts, 3, loads) == expected


@pytest.mark.parametrize(("load", "expected"), [(3, 0), (5, 1)])
def test_prefix_is_weighed_against_load(load, expected):
    """A whole prompt that is there already is worth waiting behind three others, not behind five."""

    async def run() -> int:
        router = Router(RouterConfig(decode=("http://0", "http://1")))
        prompt = chain({"prompt": A})
        first = router.choose(router.decode, prompt)
        assert first is router.decode[0]
        first.calls = {asyncio.timeout(None) for _ in range(load)}
        second = router.choose(router.decode, prompt)
        return router.decode.index(second) if second else -1

    assert asyncio.run(run()) == expected


def test_chain_is_equal_as_far_as_the_prompts_are():
    def common(a: dict[str, Any], b: dict[str, Any]) -> int:
        pairs = list(zip(chain(a), chain(b)))
        first = next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))
        assert all(x != y for x, y in pairs[first:]), "a chain that has parted must not meet again"
        return first

    system = {"role": "system", "content": A}
    assert common({"prompt": A + B}, {"prompt": A + C}) == 10
    assert common({"prompt": A}, {"prompt": A}) == 10
    assert common({"messages": [system]}, {"messages": [system, {"role": "user", "content": B}]}) >= 10
    assert common({"prompt": list(range(999))}, {"prompt": [*range(500), *range(400)]}) > 20
    assert common({"prompt": A}, {"prompt": A, "cache_salt": "other"}) == 0
    assert chain({}) == chain({"prompt": "short"}) == []


def test_memory_of_prefixes_is_bounded_and_forgets_the_oldest_ends_first(monkeypatch):
    monkeypatch.setattr(router_module, "MAX_PIECES", 15)
    node = Node("http://x")
    a, b, c = (chain({"prompt": text}) for text in (A, B, C))
    node.remember(a)
    node.remember(b)
    assert len(node.seen) == 15
    assert node.share_seen(b) == 1.0 and node.share_seen(a) == 0.5  # a has lost its end, not its beginning
    node.remember(a[:5])
    node.remember(c)
    assert node.share_seen(c) == 1.0 and node.share_seen(a) == 0.5 and node.share_seen(b) == 0.0


@aio
async def test_equal_prompts_meet_at_the_same_p():
    ps, ds = [Fake("prefill") for _ in range(3)], [Fake(), Fake()]
    async with routing(ps, ds) as client:
        for text in (A, B, C, A, B, C, B):
            assert (await client.post({"prompt": text}))[0] == 200
    assert [{body["prompt"] for body in p.got} for p in ps] == [{A}, {B}, {C}]


@aio
async def test_many_at_once_go_round():
    """As many connections as there are requests: none waits for another to end."""
    ds = [Fake("decode"), Fake("decode")]
    for d in ds:
        d.when = lambda: sum(len(d.got) for d in ds) == 240
    async with routing([], ds, policy="least_loaded") as client:
        client.session.connector._limit = 0
        answers = await asyncio.gather(*(client.post(PROMPT) for _ in range(240)))
        assert all(status == 200 for status, *_ in answers)
    assert [len(d.got) for d in ds] == [120, 120]


# ---------------------------------------------------------------- options and the process


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "at least one --decode"),
        ({"prefill": ("http://127.0.0.1:1",)}, "at least one --decode"),
        ({"decode": ("localhost:8000",)}, "'localhost:8000' is no URL"),
        ({"decode": ("http://a", "")}, "'' is no URL"),
        ({"decode": ("http://a",), "prefill": ("ftp://x",)}, "'ftp://x' is no URL"),
        ({"decode": ("http://a",), "policy": "best"}, "policy is 'best'"),
        ({"decode": ("http://a",), "order": "any"}, "order is 'any'"),
        ({"decode": ("http://a",), "port": 70000}, "port is 70000"),
        ({"decode": ("http://a",), "health_interval": 0.0}, "health_interval is 0.0"),
    ],
)
def test_mistakes_in_options(options, text):
    with pytest.raises(UserError, match=text):
        RouterConfig(**options)


def test_a_port_in_use():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"127.0.0.1:{port}"):
            route(RouterConfig(decode=("http://127.0.0.1:9",), port=port))


@contextlib.asynccontextmanager
async def process(*decode: str, shutdown_timeout: float = 2.0) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """`route` as a process of its own."""
    code = (
        "import sys; from nanopd.serve.router import RouterConfig, route; "
        f"sys.exit(route(RouterConfig(decode={decode!r}, port=0, {shutdown_timeout=})))"
    )
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stderr=pipe, stdout=pipe)
    try:
        assert child.stderr
        line = (await child.stderr.readline()).decode()
        assert line.startswith("Listening on http://127.0.0.1:"), line
        yield child, line.split()[-1]
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@aio
async def test_a_signal_lets_streams_finish(number):
    d = Fake(gap=1.0)
    await d.start()
    async with process(d.url, shutdown_timeout=60.0) as (child, url), aiohttp.ClientSession() as session:
        async with session.post(url + "/v1/completions", json=STREAM) as answer:
            assert await answer.content.readany() == PIECES[0]
            child.send_signal(number)
            with contextlib.suppress(aiohttp.ClientConnectorError):
                while True:  # until the port is closed
                    await session.get(url + "/health", headers={"Connection": "close"})
            assert await answer.content.read() == b"".join(PIECES[1:])
        assert await asyncio.wait_for(child.wait(), 20) == 0
        assert child.stderr and child.stdout
        assert (await child.stdout.read(), await child.stderr.read()) == (b"", b"")
    await d.stop()


@pytest.mark.parametrize("how", ["second signal", "time is up"])
@aio
async def test_an_end_comes_anyway(how):
    d = Fake(gap=30)
    await d.start()
    async with (
        process(d.url) as (child, url),
        aiohttp.ClientSession() as session,
        session.post(url + "/v1/completions", json=STREAM) as answer,
    ):
        assert await answer.content.readany() == PIECES[0]
        start = time.monotonic()
        child.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        assert child.returncode is None
        if how == "second signal":
            child.send_signal(signal.SIGTERM)
        await asyncio.wait_for(child.wait(), 20)  # the stream would take a minute
        took = time.monotonic() - start
        if how == "second signal":
            assert child.returncode == -signal.SIGTERM
        else:
            assert took > 1.5 and child.returncode == 0
        assert child.stderr and await child.stderr.read() == b""
    await until(lambda: "closed" in d.log)
    await d.stop()


@aio
async def test_the_process_lets_go_of_a_client_that_goes_away():
    d = Fake(delay=30)
    await d.start()
    async with process(d.url) as (_, url), aiohttp.ClientSession() as session:
        asking = asyncio.create_task(session.post(url + "/v1/completions", json=PROMPT))
        await until(lambda: d.got)
        asking.cancel()
        await until(lambda: "closed" in d.log)
    await d.stop()
