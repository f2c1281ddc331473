"""What exercise 14 is graded by."""

import functools
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any
from unittest.mock import patch

import nanopd.engine.core  # noqa: F401 (once for all cases)
from nanopd.connector.consumer import Consumer
from nanopd.connector.producer import Producer
from nanopd.connector.protocol import Cancel, Done, Failed
from nanopd.trace.events import Transfer
from nanopd_lessons import drive
from nanopd_lessons.grading import case

METHODS = "_on_message", "_fail", "_give_up", "cancel", "poll"


@functools.cache
def model() -> Path:
    return drive.tiny_model(Path(tempfile.mkdtemp()) / "tiny")


class Drill:
    """Two engines, D's with the student's methods, and what is seen of them."""

    def __init__(self, student: ModuleType, load_timeout: float) -> None:
        theirs = type("DecodeSide", (Consumer,), {name: vars(student.DecodeSide)[name] for name in METHODS})
        timeouts = {"kv_load_timeout": load_timeout, "kv_hold_timeout": 30.0}
        with patch("nanopd.connector.mooncake.Consumer", theirs):
            self.p, self.d = (drive.Node(model(), role, timeouts, num_blocks=90) for role in ("prefill", "decode"))
        self.states: dict[str, list[str]] = {}
        self.d.core.connector.consumer._trace = self._note

    def _note(self, event: Any) -> None:
        if isinstance(event, Transfer):
            self.states.setdefault(event.request_id, []).append(event.state)

    def run(self, until: Callable[[], bool] | None = None) -> None:
        drive.run_nodes(self.p, self.d, until=until, seconds=12)

    def ask(self, request_id: str, prompt: list[int]) -> None:
        self.p.prefill(request_id, prompt)
        self.d.decode(request_id, prompt, self.p)

    def result(self) -> dict[str, Any]:
        stats = self.d.core.connector.stats()
        free = [node.scheduler.kv.pool.num_free_blocks for node in (self.p, self.d)]
        counted = {"received": stats.received, "bytes": stats.received_bytes, "failures": stats.receive_failures}
        return {"tokens": self.d.tokens, "states on D": self.states, "free blocks": free, "counted": counted}


@contextmanager
def drill(student: ModuleType, load_timeout: float = 30.0) -> Iterator[Drill]:
    logger = logging.getLogger("nanopd")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # what goes wrong here does so on purpose
    try:
        with drive.in_memory():
            both = Drill(student, load_timeout)
            try:
                yield both
            finally:
                both.p.core.close()
                both.d.core.close()
    finally:
        logger.setLevel(level)


@contextmanager
def lost(owner: type, method: str, kind: type, times: int = 1) -> Iterator[list[str]]:
    """The first messages of a kind that this method should send are lost."""
    original, dropped = getattr(owner, method), list[str]()

    def send(self: Any, peer: Any, message: Any) -> None:
        if isinstance(message, kind) and len(dropped) < times:
            dropped.append(kind.__name__)
        else:
            original(self, peer, message)

    with patch.object(owner, method, send):
        yield dropped


def prompt(random: Random, num_tokens: int = 50) -> list[int]:
    return [random.randrange(290) for _ in range(num_tokens)]


@case(points=2, hint="What does the scheduler have to hear, and who is counted, when a load has come?", seconds=40)
def test_it_comes(student: ModuleType, random: Random) -> Any:
    """Loads that go well: the tokens of three requests, counted and reported"""
    with drill(student) as both:
        for i in range(3):
            both.ask(f"r{i}", prompt(random, random.randint(20, 60)))
        both.run()
        transfers = {i: sorted(r) for i, r in both.d.core.connector.consumer.poll().transfers.items()}
        return both.result() | {"transfers left over": transfers}


@case(points=2, hint="P itself has said that it writes nothing: is there anything left to reclaim?", seconds=40)
def test_p_fails(student: ModuleType, random: Random) -> Any:
    """P aborts: D hears it, and computes the prompt itself"""
    with drill(student) as both:
        both.d.decode("r", prompt(random), both.p)
        both.d.step()
        both.p.add("r", prompt(random), 1, {"do_remote_decode": True, "transfer_id": "r"})  # of another prompt
        both.run()
        return both.result()


@case(points=3, hint="D's patience is over. Its blocks are another matter: who may still write into them?", seconds=40)
def test_done_is_lost(student: ModuleType, random: Random) -> Any:
    """P's Done is lost: D gives up, tells P, computes itself, and all blocks come back"""
    with lost(Producer, "_reply", Done) as dropped, drill(student, load_timeout=0.4) as both:
        both.ask("r", prompt(random))
        both.run()
        return both.result() | {"lost": dropped}


@case(
    points=3,
    hint="A message may be lost, and so may the one that was to make up for it. When do you say it again?",
    seconds=40,
)
def test_cancels_are_lost(student: ModuleType, random: Random) -> Any:
    """The client leaves, and two Cancels are lost: D says it again until P has answered"""
    with lost(Consumer, "_send", Cancel, times=2) as dropped, drill(student, load_timeout=0.4) as both:
        both.d.decode("r", prompt(random), both.p)  # the router's request to P never came: P keeps D's, and waits
        both.d.step()
        both.d.core.abort_requests(["r"])
        held = sorted(both.d.scheduler.reclaiming)
        both.run()
        return both.result() | {"lost": dropped, "held after the client left": held}


@case(points=2, hint="Nobody asked P for this one. Does P know that nobody will?", seconds=40)
def test_nothing_is_needed(student: ModuleType, random: Random) -> Any:
    """The whole prompt is in D's own cache: P is told to let go at once, not after its 30 s"""
    with drill(student) as both:
        tokens = prompt(random, 33)
        both.d.add("before", tokens)
        both.run()
        both.ask("r", tokens)
        both.run()
        return both.result()


@case(points=3, hint="The write comes after all. Whose blocks are they by then? And is its data used?", seconds=40)
def test_late_write(student: ModuleType, random: Random) -> Any:
    """P writes long after D has given up: nobody else's memory changes, and a late Done promotes nobody"""
    asked, go = threading.Event(), threading.Event()
    with drill(student, load_timeout=0.4) as both:
        transport = type(both.p.core.connector.producer._transport)
        write = transport.write

        def held_up(self: Any, session: str, pieces: Any, cancelled: Any) -> None:
            asked.set()
            go.wait(20)
            write(self, session, pieces, lambda: False)

        with patch.object(transport, "write", held_up):
            both.ask("r", prompt(random))
            both.run(until=asked.is_set)
            both.run(until=lambda: bool(both.d.tokens["r"]))
            both.d.core.abort_requests(["r"])
            both.d.add("next", prompt(random, 280), max_tokens=12)
            both.run(until=lambda: len(both.d.tokens["next"]) > 2)
            held = sorted(both.d.scheduler.reclaiming)
            memory = both.d.core.runner.kv_cache.memory
            full = both.d.scheduler.kv.get_block_ids("next")[:70]
            before = memory[full].clone()
            go.set()
            both.run(until=lambda: not both.p.core.has_unfinished_requests())
            untouched = bool(memory[full].equal(before))
            both.run()
            end = time.monotonic() + 3
            while not both.d.core.connector.stats().received and time.monotonic() < end:  # P's Done may come later
                both.run()
                time.sleep(0.01)
        return {
            "out of use": held,
            "the next owner's memory is untouched": untouched,
            "next": both.d.tokens["next"],
        } | {"free blocks": both.result()["free blocks"], "received": both.d.core.connector.stats().received}


@case(
    points=2, hint="Gone is not the same as free: what may still be on its way when the connection breaks?", seconds=40
)
def test_p_is_gone(student: ModuleType, random: Random) -> Any:
    """P's process is gone: two requests are computed on D, and their blocks are free after the grace"""
    with drill(student) as both:
        for i in range(2):
            both.d.decode(f"r{i}", prompt(random), both.p)
        drive.run_nodes(both.d, until=lambda: len(both.d.scheduler.loading) == 2)
        time.sleep(0.1)
        both.p.core.close()
        drive.run_nodes(both.d, until=lambda: not both.d.scheduler.requests, seconds=12)
        held = sorted(both.d.scheduler.reclaiming)
        drive.run_nodes(both.d, seconds=12)
        return {
            "tokens": both.d.tokens,
            "out of use until then": held,
            "free blocks": both.d.scheduler.kv.pool.num_free_blocks,
        }


@case(points=1, hint="An answer about something that nobody waits for is no reason to do anything.", seconds=40)
def test_answers_nobody_waits_for(student: ModuleType, random: Random) -> Any:
    """Done twice, and Failed for what D never asked: ignored"""
    original = Producer._reply

    def twice(self: Any, peer: Any, message: Any) -> None:
        for _ in range(2 if isinstance(message, Done) else 1):
            original(self, peer, message)
        original(self, peer, Failed("never asked", "because"))

    with patch.object(Producer, "_reply", twice), drill(student) as both:
        both.ask("a", prompt(random))
        both.run()
        both.ask("b", prompt(random))
        both.run()
        return both.result()
