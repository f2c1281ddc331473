"""Clients and nodes that go away in the middle: right tokens or a clear error, soon, and no block is lost (rules P3-P6, P8).

P computes four tokens of each request a step, so that it can be caught in the middle of a prompt.
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.pd.conftest import (
    COMPLETIONS,
    Alone,
    Answer,
    Job,
    Node,
    Router,
    ask,
    ask_all,
    check,
    running,
    statuses,
    wait_until,
)

SOON = 20.0  # seconds, on a busy machine; what must not happen is that they wait for a timeout, and D's is 60
HOLD = 3.0
LENGTH = 700  # of prompts, in tokens
LOADING = "waiting for remote KVs"


class Nodes:
    """A P and a D, which can be started again on the ports they had."""

    def __init__(self, model: Path, stack: ExitStack) -> None:
        self.model, self.stack = model, stack
        self.p, self.d = self.make_p(), self.make_d()
        self.stack.enter_context(running(self.p, self.d))

    def make_p(self, *ports: str) -> Node:
        slow = ("--long-prefill-token-threshold", "4", "--kv-hold-timeout", str(HOLD))
        return Node(self.model, "prefill", "--num-blocks", "700", *slow, *ports)

    def make_d(self, *ports: str) -> Node:
        return Node(self.model, "decode", "--num-blocks", "700", *ports)

    def start_p_again(self) -> None:
        ports = ("--port", str(self.p.address[1]), "--kv-port", str(self.p.kv_port))
        self.p = self.stack.enter_context(self.make_p(*ports))

    def start_d_again(self) -> None:
        self.d = self.stack.enter_context(self.make_d("--port", str(self.d.address[1])))

    def wait_empty(self, seconds: float = 10.0) -> None:
        for node in (self.p, self.d):
            node.wait_empty(seconds)


@pytest.fixture(scope="module")
def shared(pd_model: Path) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(pd_model, stack)


@pytest.fixture
def nodes(shared: Nodes) -> Nodes:
    """Both up, whatever the test before has done to them."""
    if shared.p.process.poll() is not None:
        shared.start_p_again()
    if shared.d.process.poll() is not None:
        shared.start_d_again()
    try:
        shared.wait_empty(HOLD + 10)
    except AssertionError:  # what the test before has left; the next one starts anew
        shared.p.kill()
        shared.d.kill()
        raise
    return shared


@pytest.fixture
def routers(nodes: Nodes) -> Iterator[list[Router]]:
    """One of each order. Where both are used at once, what becomes of a request depends on how its router asked P and D."""
    p, d = [nodes.p.base_url], [nodes.d.base_url]
    both = [Router(p, d, "--order", order) for order in ("together", "prefill_first")]
    with running(*both):
        yield both


def urls(routers: list[Router]) -> list[str]:
    return [router.base_url for router in routers]


def in_flight(router: Router) -> int:
    health = router.request("/health")[1]
    return sum(int(node["in_flight"]) for side in ("prefill", "decode") for node in health[side])


def long_jobs(count: int, max_tokens: int = 30) -> list[Job]:
    """New prompts each time."""
    return [Job([random.randrange(256) for _ in range(LENGTH)], max_tokens) for _ in range(count)]


def in_the_middle(node: Node) -> int:
    """How many requests have a part of their prompt computed."""
    requests = node.state()["requests"].values()
    return sum(r["status"] == "running" and 0 < r["num_computed_tokens"] < LENGTH for r in requests)


async def wait_for(condition: Callable[[], Any]) -> None:
    await asyncio.to_thread(wait_until, condition, SOON)


# ---------------------------------------------------------------- clients


@pytest.mark.parametrize("where", ["while P computes", "while D decodes"])
def test_clients_leave(nodes: Nodes, routers: list[Router], where: str):
    """Rule P5: who waits for a status and who has the beginning of a stream, through either router."""
    received = nodes.d.count("kv_transfer_received")

    async def leave(asked: list["asyncio.Task[Answer]"]) -> None:
        if where == "while P computes":
            await wait_for(lambda: in_the_middle(nodes.p) == 4)
        else:
            await wait_for(lambda: statuses(nodes.d.state(), "running") == 4)
        assert not any(task.done() for task in asked)
        for task in asked:
            task.cancel()

    ask_all(urls(routers), long_jobs(4, 600), leave)
    nodes.wait_empty()
    more = nodes.d.count("kv_transfer_received") - received
    assert more == (0 if where == "while P computes" else 4), nodes.d.stderr + nodes.p.stderr
    for router in routers:
        wait_until(lambda: in_flight(router) == 0, 5)  # noqa: B023 (it is called now)


# ---------------------------------------------------------------- P


def test_p_is_killed(nodes: Nodes, routers: list[Router], alone: Alone):
    """Rules P6 and P8: D computes what P owes it, at once; when P is there again, it is used again."""
    jobs = alone(long_jobs(9))
    *eight, held = jobs
    to_p = held.body | {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    from_p = nodes.p.post(COMPLETIONS, **to_p)["kv_transfer_params"]

    async def kill(asked: list["asyncio.Task[Answer]"]) -> None:
        await wait_for(lambda: in_the_middle(nodes.p) == 8)
        assert not any(task.done() for task in asked)
        await asyncio.to_thread(nodes.p.kill)
        killed.append(time.monotonic())

    killed: list[float] = []
    answers = ask_all(urls(routers), eight, kill)
    assert time.monotonic() - killed[0] < SOON
    check(answers, eight)
    # One who was sent to P's blocks, and comes when P is gone.
    answer = nodes.d.post(COMPLETIONS, **held.body, kv_transfer_params=from_p)
    assert answer["choices"][0]["text"] == held.text
    assert time.monotonic() - killed[0] < 2 * SOON
    nodes.d.wait_empty()

    received = nodes.d.count("kv_transfer_received")
    for router in routers:
        router.wait_up("prefill", False)
    with Router([nodes.p.base_url], [nodes.d.base_url]) as another:  # which has never seen it
        without = [routers[0].base_url, another.base_url]
        check(ask_all(without, eight[:4], cache_salt="without"), eight[:4])
        assert nodes.d.count("kv_transfer_received") == received
        nodes.start_p_again()
        for router in (*routers, another):
            router.wait_up("prefill", True)
        check(ask_all(urls([*routers, another]), eight[:6], cache_salt="again"), eight[:6])
    assert nodes.d.count("kv_transfer_received") - received == nodes.p.count("kv_transfer_sent") == 6
    nodes.wait_empty()


# ---------------------------------------------------------------- D


def check_error(answer: Answer, began: bool) -> None:
    """As a status while nothing was sent, else as the last event."""
    assert answer.error is not None
    assert answer.status == (200 if began else 503), answer
    if began:
        assert "error" in answer.raw[-1] and answer.text


def test_d_is_killed_while_it_loads(nodes: Nodes, routers: list[Router]):
    """The only D: clients hear of it at once, and P lets go of what it computes for it."""

    async def kill(asked: list["asyncio.Task[Answer]"]) -> None:
        await wait_for(lambda: in_the_middle(nodes.p) == 8)
        assert await asyncio.to_thread(lambda: statuses(nodes.d.state(), LOADING)) == 8
        await asyncio.to_thread(nodes.d.kill)

    for answer in ask_all(routers[0].base_url, long_jobs(8), kill):
        check_error(answer, began=False)
    nodes.p.wait_empty(5)
    routers[0].wait_up("decode", False)
    assert routers[0].request("/health")[0] == 503


def test_d_is_killed_while_it_decodes(nodes: Nodes, routers: list[Router], alone: Alone):
    """And when it is there again, it is used again."""

    async def kill(asked: list["asyncio.Task[Answer]"]) -> None:
        await wait_for(lambda: statuses(nodes.d.state(), "running") == 4)
        await wait_for(lambda: len(streaming(nodes.d)) == 4)
        await asyncio.to_thread(nodes.d.kill)

    for i, answer in enumerate(ask_all(urls(routers), long_jobs(4, 600), kill)):
        check_error(answer, began=i % 2 == 1)
    nodes.p.wait_empty(HOLD + 5)
    sent = nodes.p.count("kv_transfer_sent")
    nodes.start_d_again()
    some = alone(long_jobs(4))
    for router in routers:
        router.wait_up("decode", True)
    check(ask_all(urls(routers), some), some)
    assert nodes.p.count("kv_transfer_sent") - sent == nodes.d.count("kv_transfer_received") == 4


def streaming(d: Node) -> list[str]:
    """Those that have ten tokens: some have reached the client, where it streams."""
    return [i for i, r in d.state()["requests"].items() if r["num_tokens"] > LENGTH + 10]


@pytest.mark.parametrize("asked", [False, True])
def test_d_is_gone_when_p_has_computed(nodes: Nodes, asked: bool):
    """P's client stays; the D has asked for the blocks, or never will. P writes to nobody, or holds them a while (P3)."""
    (job,), params = long_jobs(1), {"transfer_id": f"gone {asked}"}
    to_p: dict[str, Any] = {"max_tokens": 1, "kv_transfer_params": params | {"do_remote_decode": True}}
    where = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": nodes.p.kv_port}
    failures = nodes.p.count("kv_transfer_send_failures")

    async def main() -> Answer:
        async with aiohttp.ClientSession() as session:
            prefilling = asyncio.create_task(ask(session, nodes.p.base_url, job.body | to_p))
            if asked:
                to_d = job.body | {"kv_transfer_params": params | where}
                decoding = asyncio.create_task(ask(session, nodes.d.base_url, to_d))
                await wait_for(lambda: statuses(nodes.d.state(), LOADING) == 1)
                await wait_for(lambda: in_the_middle(nodes.p) == 1)
                await asyncio.to_thread(nodes.d.kill)
                assert (await decoding).error
            return await prefilling

    assert asyncio.run(main()).error is None
    nodes.p.wait_empty(HOLD + 10)
    assert nodes.p.count("kv_transfer_send_failures") - failures == 1
