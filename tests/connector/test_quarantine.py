"""Rule P4: a block that a peer may still write to, or read, is handed to nobody. The writes here are late; each test is
also run with the quarantine switched off, and then has to see the damage: otherwise it would prove nothing."""

import random
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from nanopd.core.kv_cache import reclaimed
from tests.connector.pair import Node, alone, run
from tests.connector.wire import Gate

RNG = random.Random(4)
PROMPT = [RNG.randrange(256) for _ in range(80)]  # 20 blocks
OTHERS = {f"other {i}": [RNG.randrange(256) for _ in range(38)] for i in range(6)}  # with their output, 15 blocks each
POOL = 48
MAX_TOKENS = 20


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> dict[str, list[int]]:
    return alone(tiny_model, [*OTHERS.items(), ("r", PROMPT)], MAX_TOKENS)


def switch_off(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.core.scheduler.kv, "quarantine", node.core.scheduler.kv.free)


def fill(node: Node, steps: int = 6) -> None:
    """Others come, and take all the room there is."""
    for request_id, prompt in OTHERS.items():
        node.add(request_id, prompt, max_tokens=MAX_TOKENS)
    for _ in range(steps):
        node.step()
    assert len(node.core.scheduler.running) >= 1 and node.num_free < 15


def held(node: Node) -> list[int]:
    """The blocks in quarantine; in no other table, and not free."""
    kv = node.core.scheduler.kv
    ids = kv.get_block_ids(reclaimed("r"))
    others = {block.block_id for name, table in kv.tables.items() if name != reclaimed("r") for block in table}
    assert not others & set(ids) and not {b.block_id for b in kv.pool.free_queue.in_order()} & set(ids)
    return ids


@pytest.mark.parametrize("quarantine", [True, False], ids=["", "switched off"])
@pytest.mark.parametrize("moment", ["D has aborted", "D's time is over"])
def test_a_late_write_hurts_no_other(
    tiny_model: Path,
    expected: dict[str, list[int]],
    made: list[Node],
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
    quarantine: bool,
):
    p = Node(tiny_model, "prefill")
    d = Node(tiny_model, "decode", {"kv_load_timeout": 60 if moment == "D has aborted" else 0.2}, num_blocks=POOL)
    made += [p, d]
    gate = Gate.before(p)
    if not quarantine:
        switch_off(d, monkeypatch)
    d.decode("r", PROMPT, p, max_tokens=MAX_TOKENS)
    p.prefill("r", PROMPT)
    gate.wait(p, d)
    if moment == "D has aborted":
        d.core.abort_requests(["r"])
    else:
        run(d, until=lambda: not d.core.scheduler.loading)
    fill(d)
    assert d.core.scheduler.reclaiming == {"r"} and len(held(d)) == (20 if quarantine else 0)
    gate.may_write.set()
    run(d, until=lambda: gate.written == 1)  # lands while others read their blocks
    run(p, d)
    want = {i: tokens for i, tokens in expected.items() if i in OTHERS or moment != "D has aborted"}
    right = {i: d.tokens[i] for i in want} == want
    assert right is quarantine
    assert d.num_free == POOL and p.num_free == 200


@pytest.mark.parametrize("quarantine", [True, False], ids=["", "switched off"])
@pytest.mark.parametrize("who", ["D", "P"])
def test_what_is_being_sent_stays_as_it_is(
    tiny_model: Path,
    expected: dict[str, list[int]],
    made: list[Node],
    monkeypatch: pytest.MonkeyPatch,
    who: str,
    quarantine: bool,
):
    """Aborted on either side while P's transport reads the blocks; on P that can only be in the middle of a prompt."""
    transfer = {"kv_push": "whole" if who == "D" else "per_chunk"}
    p = Node(tiny_model, "prefill", transfer, num_blocks=POOL, long_prefill_token_threshold=40)
    d = Node(tiny_model, "decode")
    made += [p, d]
    gate = Gate.before(p)
    if not quarantine:
        switch_off(p, monkeypatch)
    d.decode("r", PROMPT, p, max_tokens=MAX_TOKENS)
    p.prefill("r", PROMPT)
    ids: list[int] = []
    while not gate.begun.acquire(timeout=0.01):
        p.step()
        d.step()
        ids = p.core.scheduler.kv.get_block_ids("r") or ids
    ids = ids[: 20 if who == "D" else 10]
    memory = p.core.runner.kv_cache.memory
    sent = memory[torch.tensor(ids)].clone()
    assert sent.abs().sum() > 0
    (d if who == "D" else p).core.abort_requests(["r"])
    d.step()
    fill(p)
    run(p, until=lambda: len(p.ended) == len(OTHERS) + (who == "D"))
    assert torch.equal(memory[torch.tensor(ids)], sent) is quarantine
    assert p.core.scheduler.reclaiming == {"r"} and set(held(p)) >= (set(ids) if quarantine else set())
    gate.may_write.set()
    run(p, d)
    assert {i: p.tokens[i] for i in OTHERS} == {i: expected[i] for i in OTHERS}
    assert who == "D" or d.tokens["r"] == expected["r"]
    assert p.num_free == POOL and d.num_free == 200


class Wire:
    """A piece of network between D and P's side channel, which can be cut while both live."""

    def __init__(self, port: int) -> None:
        self.to = port
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                here, _ = self.listener.accept()
                there = socket.create_connection(("127.0.0.1", self.to))
                self.sockets += [here, there]
                for pair in ((here, there), (there, here)):
                    threading.Thread(target=self._pump, args=pair, daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)

    def cut(self) -> None:
        for end in self.sockets:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self.sockets.clear()

    def close(self) -> None:
        self.listener.close()
        self.cut()


@pytest.mark.parametrize("p_is", ["about to compute", "writing"])
def test_the_connection_is_lost_and_p_lives(
    tiny_model: Path, expected: dict[str, list[int]], made: list[Node], p_is: str
):
    """D cannot tell a dead P from a lost connection: a P that lives must not write once D has counted it as gone."""
    p, d = Node(tiny_model, "prefill"), Node(tiny_model, "decode", num_blocks=POOL)
    made += [p, d]
    wire, gate = Wire(p.core.connector.port), Gate.before(p)
    d.decode("r", PROMPT, wire.port, max_tokens=MAX_TOKENS)
    run(d, until=lambda: p.core.connector.producer._sends, seconds=5)
    if p_is == "writing":
        p.prefill("r", PROMPT)
        gate.wait(p, d)
    wire.cut()
    deadline = time.monotonic() + 3
    while (d.core.scheduler.loading or d.core.scheduler.reclaiming) and time.monotonic() < deadline:
        d.step()
    fill(d)
    if p_is != "writing":
        p.prefill("r", PROMPT)
    for _ in range(20):
        p.step()
        time.sleep(0.01)
    gate.may_write.set()
    for _ in range(100):
        p.step()
        time.sleep(0.002)
    run(d, seconds=10)
    assert {i: d.tokens[i] for i in OTHERS} == {i: expected[i] for i in OTHERS}
    wire.close()


def test_p_restarts_while_d_is_idle(tiny_model: Path, expected: dict[str, list[int]], made: list[Node]):
    """What D learns late about the old connection must not end a load over the new one, with P still writing."""
    p, d = Node(tiny_model, "prefill"), Node(tiny_model, "decode", num_blocks=POOL)
    port = p.core.connector.port
    p.prefill("warm", PROMPT[::-1])
    d.decode("warm", PROMPT[::-1], p)
    run(p, d)
    p.core.close()
    p2 = Node(tiny_model, "prefill", {"kv_port": port})
    made += [p2, d]
    time.sleep(0.5)  # D is idle; its socket finds the new P by itself
    gate = Gate.before(p2)
    d.decode("r", PROMPT, p2, max_tokens=MAX_TOKENS)
    deadline = time.monotonic() + 2
    while "r" not in d.ended and time.monotonic() < deadline:
        d.step()
    p2.prefill("r", PROMPT)
    begun = time.monotonic() + 1
    while not gate.begun.acquire(timeout=0.001) and time.monotonic() < begun:
        p2.step()
        d.step()
    fill(d)
    gate.may_write.set()
    for _ in range(50):
        p2.step()
        time.sleep(0.002)
    run(p2, d)
    assert d.tokens["r"] == expected["r"]
    assert {i: d.tokens[i] for i in OTHERS} == {i: expected[i] for i in OTHERS}
    assert d.core.connector.stats().receive_failures == 0, "P was there all the time"
