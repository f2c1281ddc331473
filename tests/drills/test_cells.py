"""Each fault that leaves the processes alive, at each of its points, in this process: the real connector, the real Mooncake.

Eight requests in flight. P aborts one of them, two are aborted on D; so that Cancel and Failed are said, and can be lost.
Every other one has to bring the tokens of an engine alone, all blocks have to be free soon, and sixteen more have to be
served rightly (rules P3-P6, P8). After each cell it is also asked whether every step of every transfer stands in the
tables of states.
"""

import importlib
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanopd import cli
from nanopd.connector.consumer import Consumer
from nanopd.connector.producer import Producer
from nanopd.connector.protocol import RECV_TRANSITIONS, SEND_TRANSITIONS, RecvState, SendState
from nanopd.connector.transport import TransferError
from nanopd.trace.events import Event, Transfer
from tests.connector.pair import Node, alone

cli.add_checkout_commands()
faults: Any = importlib.import_module("nanopd_lessons.faults")

RNG = random.Random(14)
PROMPTS = {f"r{i}": [RNG.randrange(256) for _ in range(RNG.choice([40, 60, 90]))] for i in range(8)}
MORE = {f"m{i}": [RNG.randrange(256) for _ in range(RNG.choice([20, 50]))] for i in range(16)}
MAX_TOKENS = 8
LOAD, HOLD = (
    1.5,
    3.0,
)  # where a message is lost, D's patience ends after LOAD; elsewhere it must not, however busy we are
PATIENT = 30.0
SOON = 20.0  # seconds, on a busy machine; without faults it takes a tenth of a second

ALWAYS = ("delay", "duplicate", "error")
CELLS = [(point, kind) for point in ("before-pull", "cancel", "failed") for kind in ("drop", *ALWAYS)]
CELLS += [(point, kind) for point in ("after-pull", "middle-of-write", "after-write") for kind in ("delay", "error")]
CELLS += [(point, kind) for point in ("before-write", "done-arrives", "promotion") for kind in ("delay", "error")]
CELLS += [("before-write", "duplicate"), ("done", "drop"), ("done", "delay"), ("done", "duplicate")]
CELLS += [("prefill", kind) for kind in ("delay", "error", "abort")]
CELLS += [("decode", kind) for kind in ("delay", "error", "abort")]
CELLS.remove(("failed", "error"))  # it ends P's thread, as done.error does: a drill with processes


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> dict[str, list[int]]:
    return alone(tiny_model, [*PROMPTS.items(), *MORE.items()], MAX_TOKENS)


@pytest.fixture
def seam() -> Iterator[Any]:
    seam = faults.Seam()
    undo = [faults.wrap(importlib.import_module(name), seam) for name in faults._methods()]
    yield seam
    for unwrap in undo:
        unwrap()


class Side:
    """A node in which P's and D's steps can fail and be told apart by the faults."""

    def __init__(self, node: Node, traced: list[Transfer]) -> None:
        self.node, self.failed = node, 0

        def trace(event: Event) -> None:
            if isinstance(event, Transfer):
                traced.append(event)

        for part in (node.core.connector.producer, node.core.connector.consumer):
            if part is not None:
                assert isinstance(part, (Producer, Consumer))
                part._trace = trace

    def step(self) -> None:
        try:
            self.node.step()
        except (RuntimeError, TransferError) as error:
            if "a fault on purpose" not in str(error):
                raise
            self.failed += 1
            self.node.core.scheduler.check_invariants()


def until(condition: Any, *sides: Side) -> None:
    end = time.monotonic() + SOON
    while not condition():
        for side in sides:
            side.step()
        assert time.monotonic() < end, [(s.node.core.scheduler, s.node.core.scheduler.reclaiming) for s in sides]


def legal(traced: list[Transfer]) -> None:
    """The trace and the tables agree: each transfer begins where one can begin, and goes only where it may."""
    last: dict[tuple[str, str], Any] = {}
    begins = {"send": {SendState.ASKED, SendState.COMPUTING}, "recv": {RecvState.ASKED}}
    for event in traced:
        key, state = (event.side, event.transfer_id), (SendState if event.side == "send" else RecvState)(event.state)
        table: dict[Any, Any] = SEND_TRANSITIONS if event.side == "send" else RECV_TRANSITIONS  # type: ignore[assignment]
        before = last.get(key)
        if before is None:
            # What D asks for before P's request has come is not told as such: it is seen when that comes.
            reachable = begins[event.side] | {s for b in begins[event.side] for s in table[b]}
            assert state in reachable, event
        else:
            assert state in table[before], (before, event)
        last[key] = state
    assert all(not (SEND_TRANSITIONS if side == "send" else RECV_TRANSITIONS)[s] for (side, _), s in last.items()), last


@pytest.mark.parametrize(("point", "kind"), CELLS, ids=[f"{point}.{kind}" for point, kind in CELLS])
def test_a_cell(tiny_model: Path, expected: dict[str, list[int]], made: list[Node], seam: Any, point: str, kind: str):
    p = Node(tiny_model, "prefill", {"kv_hold_timeout": HOLD}, long_prefill_token_threshold=24)
    lost = kind == "drop" or (point, kind) in (("before-pull", "error"), ("done-arrives", "error"))
    d = Node(tiny_model, "decode", {"kv_load_timeout": LOAD if lost else PATIENT})
    made += [p, d]
    traced: list[Transfer] = []
    on_p, on_d = Side(p, traced), Side(d, traced)
    own = (p if faults.POINTS[point].node == "P" else d).core
    if point in ("prefill", "decode"):  # both nodes are engines of this process
        step = own.step
        other = (d if own is p.core else p).core
        other.step = type(other).step.__wrapped__.__get__(other)  # type: ignore[attr-defined,method-assign]
        assert step
    fault = {"id": "x", "point": point, "kind": kind, "seconds": 0.1, "skip": 1, "times": 3}
    seam.faults = [fault | ({"skip": 0} if point in ("cancel", "failed") else {})]

    for request_id, prompt in PROMPTS.items():
        d.decode(request_id, prompt, p, max_tokens=MAX_TOKENS)
    on_d.step()
    for request_id, prompt in PROMPTS.items():
        p.prefill(request_id, prompt)
    on_p.step()
    p.core.abort_requests(["r5"])
    d.core.abort_requests(["r6", "r7"])
    wanted = {f"r{i}" for i in range(6)}
    aborted = kind == "abort" and point == "decode"  # the drill ends all that D has
    until(lambda: wanted <= set(d.ended) or (aborted and not d.core.scheduler.requests), on_p, on_d)
    until(lambda: not (p.core.has_unfinished_requests() or d.core.has_unfinished_requests()), on_p, on_d)
    assert [k for _, k in seam.fired] and {k for _, k in seam.fired} == {kind}
    if not aborted:
        assert {i: d.tokens[i] for i in wanted} == {i: expected[i] for i in wanted}
    assert p.num_free == 200 and d.num_free == 200

    seam.faults = []
    for request_id, prompt in MORE.items():
        p.prefill(request_id, prompt)
        d.decode(request_id, prompt, p, max_tokens=MAX_TOKENS)
    before = d.core.connector.stats().received
    until(lambda: not (p.core.has_unfinished_requests() or d.core.has_unfinished_requests()), on_p, on_d)
    assert {i: d.tokens[i] for i in MORE} == {i: expected[i] for i in MORE}
    assert d.core.connector.stats().received > before  # all, but for a machine too busy for LOAD
    for node in p, d:
        node.core.scheduler.check_invariants()
        assert node.num_free == 200
    legal(traced)


def test_the_tables_are_whole():
    """Every state can be reached from a beginning, and from every state there is a way to an end."""
    for table, begin in (
        (SEND_TRANSITIONS, [SendState.ASKED, SendState.COMPUTING]),
        (RECV_TRANSITIONS, [RecvState.ASKED]),
    ):
        seen: set[Any] = set(begin)
        while more := {after for state in seen for after in table[state]} - seen:
            seen |= more
        assert seen == set(table)
        for state, after in table.items():
            assert (not after) == (state.name in ("DONE", "FAILED"))
            assert not after or any(s.name == "FAILED" for s in after), f"{state} cannot fail"


def test_sys_is_as_it_was():
    """The cells leave no wrapper behind."""
    assert not hasattr(Consumer._send, "__wrapped__") and "nanopd.connector.consumer" in sys.modules
