"""Peers that lie, stammer or fall silent: they hurt nobody but themselves (rules P1, P2, P3, P6, P8)."""

import itertools
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from nanopd.connector.protocol import CANCELLED, MAX_FRAME, VERSION, Cancel, Done, Failed, KVTransferParams, Pull
from nanopd.request import Request
from tests.connector.pair import Node, alone, run
from tests.connector.wire import SECONDS, Dealer, FakeP, encode, pull

HOLD = 2.0  # P's kv_hold_timeout here
LOAD = 0.5  # D's kv_load_timeout, where P is a fake
PROMPT = [random.Random(1).randrange(256) for _ in range(50)]
OPTIONS = {"enable_prefix_caching": False}  # so that the same prompt is fetched each time
DEEP = b"\x81\xa1x" + b"\x91" * 5000 + b"\xc0"  # {"x": [[[[…]]]]}


_broken: list[Node] = []  # kept: what has died holds sockets, and a ZMQ context that is collected waits for them


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[int]:
    return alone(tiny_model, [("r", PROMPT)])["r"]


# ---------------------------------------------------------------- P, and a D that says what it likes


@pytest.fixture(scope="module")
def _nodes() -> Iterator[list[Node]]:
    nodes: list[Node] = []
    yield nodes
    for node in nodes:
        node.core.close()


@pytest.fixture
def nodes(tiny_model: Path, expected: list[int], _nodes: list[Node]) -> Iterator[tuple[Node, Node]]:
    """A P and a D. After the test both have to be as good as new: a real request passes through them."""
    if not _nodes:
        _nodes += [Node(tiny_model, "prefill", {"kv_hold_timeout": HOLD}, **OPTIONS)]
        _nodes += [Node(tiny_model, "decode", **OPTIONS)]
    p, d = _nodes
    try:
        yield p, d
        run(p, d, seconds=10)
        received = d.core.connector.stats().received
        real = new(p).request_id
        d.decode(real, PROMPT, p)
        run(p, d, seconds=10)
        assert d.tokens[real] == expected and d.core.connector.stats().received == received + 1
        for node in p, d:
            node.core.scheduler.check_invariants()
            assert node.num_free == 200
        assert not p.core.connector.producer._sends and p.core.connector.producer._thread.is_alive()
    except BaseException:
        _broken.extend(_nodes)
        _nodes.clear()  # the next test gets others
        raise


@pytest.fixture
def dealer(nodes: tuple[Node, Node]) -> Iterator[Dealer]:
    dealer = Dealer(nodes[0])
    yield dealer
    dealer.close()


def new(p: Node, numbers: Iterator[int] = itertools.count()) -> Request:  # noqa: B008 (one for all)
    """A prompt that P has to compute, under an id that was never used: P remembers what has been cancelled."""
    return p.prefill(f"r{next(numbers)}", PROMPT)


def hold(p: Node) -> Request:
    """P has computed the prompt and waits for a D."""
    request = new(p)
    run(p, until=lambda: request.request_id in p.ended)
    p.step()
    assert request.request_id in p.core.scheduler.reclaiming
    return request


NOT_UNDERSTOOD = "did not understand"
GOOD = {"type": "Cancel", "version": VERSION, "transfer_id": "t"}


@pytest.mark.parametrize(
    ("frames", "transfer_id", "reason"),
    [
        ([b""], "", NOT_UNDERSTOOD),
        ([b"\xc1"], "", NOT_UNDERSTOOD),
        ([bytes(range(256)) * 10], "", NOT_UNDERSTOOD),
        ([b"GET / HTTP/1.1\r\n\r\n"], "", NOT_UNDERSTOOD),
        ([b"", b""], "", NOT_UNDERSTOOD),
        ([b"x"] * 1000, "", NOT_UNDERSTOOD),
        ([b"", encode(GOOD)], "t", CANCELLED),  # what a REQ socket sends
        ([encode(GOOD), b""], "", NOT_UNDERSTOOD),
        ([encode(GOOD) + b"x"], "", NOT_UNDERSTOOD),
        ([DEEP], "", NOT_UNDERSTOOD),
        ([b"\x83" + encode(GOOD)[1:-1] + b"\xff"], "", NOT_UNDERSTOOD),  # text that is no UTF-8
        ([encode([])], "", NOT_UNDERSTOOD),
        ([encode({})], "", NOT_UNDERSTOOD),
        ([encode(None)], "", NOT_UNDERSTOOD),
        ([encode({1: 2})], "", NOT_UNDERSTOOD),
        ([encode(GOOD | {"type": "Done"})], "t", NOT_UNDERSTOOD),
        ([encode(GOOD | {"type": 7})], "t", NOT_UNDERSTOOD),
        ([encode(GOOD | {"version": "1"})], "t", NOT_UNDERSTOOD),
        ([encode(GOOD | {"version": 1.5})], "t", NOT_UNDERSTOOD),
        ([encode(GOOD | {"version": None})], "t", NOT_UNDERSTOOD),
        ([encode(GOOD | {"transfer_id": 7})], "", NOT_UNDERSTOOD),
        ([encode(GOOD | {"transfer_id": ["t"]})], "", NOT_UNDERSTOOD),
        ([encode(GOOD | {"transfer_id": "t" * 257})], "", NOT_UNDERSTOOD),  # P remembers thousands of them
        ([encode(GOOD | {"unknown": 1})], "t", NOT_UNDERSTOOD),
        ([encode(GOOD | {"unknown": 1, "version": VERSION + 1})], "t", f"speaks version {VERSION}"),
        ([encode({"type": "Cancel", "transfer_id": "t"})], "t", NOT_UNDERSTOOD),
        ([encode(Done("t", 1, 1, 1.0, 1.0))], "t", NOT_UNDERSTOOD),
        ([encode(Cancel(VERSION, "nobody"))], "nobody", CANCELLED),
    ],
)
def test_what_is_no_message_is_refused(dealer: Dealer, frames: list[bytes], transfer_id: str, reason: str):
    answer = dealer.ask(*frames)
    assert isinstance(answer, Failed) and answer.transfer_id == transfer_id and reason in answer.reason


def test_a_message_cut_short_is_refused(nodes: tuple[Node, Node], dealer: Dealer):
    request = hold(nodes[0])
    whole = encode(pull(*nodes, request))
    for end in range(0, len(whole), 3):
        answer = dealer.ask(whole[:end])
        assert isinstance(answer, Failed) and NOT_UNDERSTOOD in answer.reason
    assert isinstance(dealer.ask(whole), Done)  # nothing has happened to the transfer


def test_a_message_too_long_ends_its_connection_only(nodes: tuple[Node, Node], dealer: Dealer):
    """P7: sizes are bounded before parsing."""
    request = hold(nodes[0])
    long = Dealer(nodes[0])
    long.say(encode(pull(*nodes, request, transfer_id="x" * MAX_FRAME)))
    assert long.hear(0.3) is None
    assert isinstance(dealer.ask(encode(pull(*nodes, request))), Done)
    assert isinstance(long.ask(encode(Cancel(VERSION, "t"))), Failed)  # over its next connection
    long.close()


COUNT = 13  # blocks of PROMPT


def check_held(nodes: tuple[Node, Node], dealer: Dealer, request: Request, reason: str) -> None:
    """What was no message has done nothing to the transfer; what was a bad Pull has ended it at once."""
    if reason == NOT_UNDERSTOOD:
        assert isinstance(dealer.ask(encode(pull(*nodes, request))), Done)
    run(nodes[0], seconds=1.5)  # less than HOLD


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": VERSION + 1}, "version"),
        ({"version": 0}, "version"),
        ({"version": -(2**63)}, "version"),
        ({"block_ids": [200, *range(12)]}, "block id"),
        ({"block_ids": [-1, *range(12)]}, NOT_UNDERSTOOD),
        ({"block_ids": [2**64 - 1, *range(12)]}, NOT_UNDERSTOOD),
        ({"block_ids": list(range(COUNT - 1))}, "do not fill"),
        ({"block_ids": list(range(COUNT + 1))}, "do not fill"),
        ({"block_ids": []}, "do not fill"),
        ({"num_tokens": 0}, "do not fill"),
        ({"num_tokens": -50}, NOT_UNDERSTOOD),
        ({"num_tokens": 2**63}, NOT_UNDERSTOOD),
        ({"num_tokens": 0, "block_ids": []}, "do not fill"),
        ({"num_tokens": 49}, "another one"),  # as many blocks, and not our prompt
        ({"num_tokens": 400, "block_ids": list(range(100))}, "another one"),
        ({"prompt_hash": b""}, "another one"),
        ({"prompt_hash": b"x" * 1000}, "another one"),
        ({"first_block": -1, "block_ids": list(range(COUNT + 1))}, NOT_UNDERSTOOD),
        ({"first_block": COUNT, "block_ids": []}, "do not fill"),
        ({"first_block": 2**63, "block_ids": []}, NOT_UNDERSTOOD),
        ({"base_address": 0}, "could not write"),
        ({"base_address": 2**64 - 1}, NOT_UNDERSTOOD),
        ({"session": ""}, ""),
        ({"session": "\0"}, ""),
        ({"session": "127.0.0.1:1"}, "could not write"),
        ({"session": "nobody at home"}, ""),
    ],
    ids=str,
)
def test_a_pull_that_cannot_be_served(nodes: tuple[Node, Node], dealer: Dealer, changes: dict[str, Any], reason: str):
    request = hold(nodes[0])
    answer = dealer.ask(encode(pull(*nodes, request, **changes)))
    assert isinstance(answer, Failed) and answer.transfer_id == request.request_id
    assert answer.reason and reason in answer.reason
    check_held(nodes, dealer, request, reason)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "another"}, "model"),
        ({"dtype": "float16"}, "dtype"),
        ({"kv_layout": "kv_first"}, "kv_layout"),
        ({"block_size": 8}, "block_size"),
        ({"block_size": 0}, "block_size"),
        ({"num_runs": 6}, "num_runs"),
        ({"run_bytes": 1}, "run_bytes"),
        ({"run_bytes": -1}, NOT_UNDERSTOOD),
        ({"num_blocks": 0}, "block id"),
        ({"num_blocks": -1}, NOT_UNDERSTOOD),
        ({"num_blocks": 2**63}, NOT_UNDERSTOOD),
    ],
    ids=str,
)
def test_a_pull_from_another_kind_of_engine(
    nodes: tuple[Node, Node], dealer: Dealer, changes: dict[str, Any], reason: str
):
    """Rule P2."""
    request = hold(nodes[0])
    good = pull(*nodes, request)
    bad = msgspec.structs.replace(good, layout=msgspec.structs.replace(good.layout, **changes))
    answer = dealer.ask(encode(bad))
    assert isinstance(answer, Failed) and answer.transfer_id == request.request_id and reason in answer.reason
    check_held(nodes, dealer, request, reason)


@pytest.mark.parametrize("value", [None, 1.5, True, {}, [[]], ["x"]], ids=str)
def test_a_pull_of_wrong_types(nodes: tuple[Node, Node], dealer: Dealer, value: Any):
    request = hold(nodes[0])
    good = pull(*nodes, request)
    raw = msgspec.to_builtins(good, builtin_types=[bytes]) | {"type": "Pull"}
    for field in Pull.__struct_fields__:
        answer = dealer.ask(encode(raw | {field: value}))
        assert isinstance(answer, Failed) and NOT_UNDERSTOOD in answer.reason, field
    for field in good.layout.__struct_fields__:
        answer = dealer.ask(encode(raw | {"layout": raw["layout"] | {field: value}}))
        assert isinstance(answer, Failed) and NOT_UNDERSTOOD in answer.reason, field
    assert isinstance(dealer.ask(encode(raw)), Done)  # nothing has happened to the transfer


def test_pull_twice(nodes: tuple[Node, Node], dealer: Dealer):
    request = hold(nodes[0])
    message = encode(pull(*nodes, request))
    dealer.say(message)
    dealer.say(message)
    answers = [dealer.hear(), dealer.hear(1.0)]
    assert sum(isinstance(answer, Done) for answer in answers) == 1


def test_pull_after_done(nodes: tuple[Node, Node], dealer: Dealer):
    request = hold(nodes[0])
    message = encode(pull(*nodes, request))
    assert isinstance(dealer.ask(message), Done)
    run(nodes[0])
    other = Dealer(nodes[0])
    for who in dealer, dealer, other:
        assert isinstance(who.ask(message), Failed)
    other.close()


def test_cancel_twice_and_messages_after_it(nodes: tuple[Node, Node], dealer: Dealer):
    request = hold(nodes[0])
    message, cancel = encode(pull(*nodes, request)), encode(Cancel(VERSION, request.request_id))
    for frame in (cancel, cancel, message, cancel, message):
        assert dealer.ask(frame) == Failed(request.request_id, CANCELLED)
    run(nodes[0], seconds=1.5)


@pytest.mark.parametrize("what", ["Cancel", "Pull", "another layout"])
def test_another_peer_cannot_touch_a_transfer(nodes: tuple[Node, Node], dealer: Dealer, what: str):
    p, d = nodes
    request = new(p)
    good = pull(p, d, request)
    dealer.say(encode(good))
    assert dealer.hear(0.2) is None
    other = Dealer(p)
    wrong = msgspec.structs.replace(good, layout=msgspec.structs.replace(good.layout, model="x"))
    message = {"Cancel": Cancel(VERSION, request.request_id), "Pull": good, "another layout": wrong}[what]
    answer = other.ask(encode(message))
    assert isinstance(answer, Failed) and "another node" in answer.reason
    run(p)
    assert isinstance(dealer.hear(), Done)
    other.close()


def test_a_thousand_pulls_for_nobody(nodes: tuple[Node, Node], dealer: Dealer):
    """P3: each hears no after kv_hold_timeout; in the meantime others are served."""
    p, d = nodes
    request = hold(p)
    good = pull(p, d, request)
    for i in range(1000):
        dealer.say(encode(msgspec.structs.replace(good, transfer_id=f"unknown {i}")))
    other = Dealer(p)
    start = time.monotonic()
    assert isinstance(other.ask(encode(good)), Done)
    assert time.monotonic() - start < HOLD
    answers = [dealer.hear() for _ in range(1000)]
    assert {answer.transfer_id for answer in answers if isinstance(answer, Failed)} == {
        f"unknown {i}" for i in range(1000)
    }
    other.close()


def test_peers_that_vanish(nodes: tuple[Node, Node]):
    """With a transfer asked for, held, or half way through a message."""
    p, d = nodes
    for moment in ("asked", "held"):
        request = hold(p) if moment == "held" else new(p)
        dealer = Dealer(p)
        dealer.say(encode(pull(p, d, request)))
        dealer.socket.close(linger=100)
        run(p, seconds=HOLD + 3)
    for _ in range(100):
        dealer = Dealer(p)
        dealer.say(encode(Cancel(VERSION, "t")))
        dealer.close()


def test_two_requests_of_one_transfer_on_p(nodes: tuple[Node, Node]):
    """An id that a client or a router uses twice: no block is lost, nobody waits for ever."""
    p, _ = nodes
    for request_id in ("first", "second"):
        p.add(request_id, PROMPT, KVTransferParams(do_remote_decode=True, transfer_id="same"), 1)
    run(p, seconds=HOLD + 3)


def test_a_second_request_of_a_transfer_that_is_held(nodes: tuple[Node, Node], dealer: Dealer):
    p, d = nodes
    request = hold(p)
    p.add("second", PROMPT, KVTransferParams(do_remote_decode=True, transfer_id=request.request_id), 1)
    run(p, until=lambda: "second" in p.ended)
    p.step()
    dealer.say(encode(pull(p, d, request)))
    assert dealer.hear() is not None
    run(p, seconds=HOLD + 3)


@pytest.mark.parametrize("order", ["at once", "the first is being reclaimed"])
def test_two_requests_of_one_transfer_on_d(nodes: tuple[Node, Node], expected: list[int], order: str):
    p, d = nodes
    d.decode("first", PROMPT, p, "same")
    d.step()
    if order != "at once":
        d.core.abort_requests(["first"])
    d.decode("second", PROMPT, p, "same")
    p.add("p", PROMPT, KVTransferParams(do_remote_decode=True, transfer_id="same"), 1)
    run(p, d, seconds=HOLD + 5)
    assert d.tokens["second"] == expected
    assert order != "at once" or d.tokens["first"] == expected


# ---------------------------------------------------------------- D, and a P that says what it likes


@pytest.fixture(scope="module")
def _decode() -> Iterator[list[Node]]:
    nodes: list[Node] = []
    yield nodes
    for node in nodes:
        node.core.close()


@pytest.fixture
def d(tiny_model: Path, _decode: list[Node]) -> Iterator[Node]:
    if not _decode:
        _decode.append(Node(tiny_model, "decode", {"kv_load_timeout": LOAD}, **OPTIONS))
    try:
        yield _decode[0]
        run(_decode[0], seconds=5)
        _decode[0].core.scheduler.check_invariants()
        assert _decode[0].num_free == 200
    except BaseException:
        _broken.extend(_decode)
        _decode.clear()
        raise


@pytest.fixture
def fake() -> Iterator[FakeP]:
    fake = FakeP()
    yield fake
    fake.close()


def ask(d: Node, fake: FakeP) -> Pull:
    d.decode("r", PROMPT, fake.port)
    d.step()
    message = fake.hear()
    assert isinstance(message, Pull)
    return message


def finish(d: Node, seconds: float = 5) -> list[int]:
    d.ended.pop("r", None)
    run(d, seconds=seconds, until=lambda: "r" in d.ended)
    return d.tokens["r"]


DONE = encode(Done("r", 1, 1, 1.0, 1.0))


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\xc1"],
        [b"x"] * 100,
        [DEEP],
        [DONE[:-1]],
        [DONE + b"x"],
        [encode([])],
        [encode({"type": "Done", "transfer_id": "r"})],
        [encode({"type": "Failed", "transfer_id": "r", "reason": 7})],
        [encode({"type": "Failed", "transfer_id": "r", "reason": "", "unknown": 1})],
        [encode({"type": "Done", "transfer_id": "r", "num_bytes": "1"})],
        [encode(Cancel(VERSION, "r"))],
        [DONE.replace(b"\xa1r", b"\xa1\xff")],
        [encode(Done("nobody", 1, 1, 1.0, 1.0))],
        [encode(Failed("nobody", ""))],
        [encode(Failed("", "x"))],
    ],
    ids=lambda frames: repr(frames[0][:40]),
)
def test_d_ignores_what_is_no_answer(d: Node, fake: FakeP, expected: list[int], frames: list[bytes]):
    """It waits as long as it may, tells P, and keeps the blocks until P has answered (P4)."""
    ask(d, fake)
    fake.say(*frames)
    assert finish(d) == expected
    assert fake.hear() == Cancel(VERSION, "r")
    assert d.core.scheduler.reclaiming == {"r"} and d.num_free == 200 - COUNT
    fake.say(encode(Failed("r", CANCELLED)))


def test_a_silent_p(d: Node, fake: FakeP, expected: list[int]):
    """P3, P4: as long as it lives it may still write. D goes on without those blocks."""
    ask(d, fake)
    assert finish(d) == expected
    d.decode("s", PROMPT, fake.port)
    run(d, until=lambda: "s" in d.ended, seconds=5)
    assert d.tokens["s"] == expected and d.num_free == 200 - 2 * COUNT
    fake.close()


def test_a_lost_answer_to_a_cancel(d: Node, fake: FakeP, expected: list[int], caplog: pytest.LogCaptureFixture):
    """P4: D asks again and again, and says which blocks it keeps out of use meanwhile; one answer is enough."""
    ask(d, fake)
    assert finish(d) == expected
    end = time.monotonic() + SECONDS
    heard = [fake.hear(0)]
    while len(heard) < 3:
        d.step()
        if message := fake.hear(0):
            heard.append(message)
        assert time.monotonic() < end, heard
    assert heard == [Cancel(VERSION, "r")] * 3 and d.num_free == 200 - COUNT
    assert f"r: its blocks stay out of use: ('127.0.0.1', {fake.port}) may still write" in caplog.text
    fake.say(encode(Failed("r", CANCELLED)))
    run(d, seconds=5)
    assert d.num_free == 200


def test_a_p_that_talks_too_much(d: Node, fake: FakeP, expected: list[int]):
    """A frame that is too long ends the connection, and the load with it."""
    ask(d, fake)
    fake.say(b"x" * (MAX_FRAME + 1))
    assert finish(d) == expected
    fake.close()  # until then it may still write: the blocks stay out of use (P4)


@pytest.mark.parametrize("moment", ["before it answers", "after a part of an answer", "after the time is over"])
def test_a_p_that_goes_away(d: Node, fake: FakeP, expected: list[int], moment: str):
    """Rule P6."""
    ask(d, fake)
    if moment == "after a part of an answer":
        fake.say(DONE[:10])
        time.sleep(0.05)
    if moment == "after the time is over":
        assert finish(d) == expected
    fake.close()
    if moment != "after the time is over":
        assert finish(d) == expected


def test_two_requests_of_one_transfer_and_a_silent_p(d: Node, fake: FakeP, expected: list[int]):
    """The end of the one does not take the other's time limit away."""
    d.decode("r", PROMPT, fake.port, "same")
    d.decode("s", PROMPT, fake.port, "same")
    assert finish(d) == expected
    run(d, until=lambda: "s" in d.ended, seconds=5)
    assert d.tokens["s"] == expected
    fake.close()


def give(source: Node, d: Node, message: Pull) -> None:
    """What a P would do: PROMPT's blocks are there."""
    source.add("s", PROMPT, max_tokens=2)
    source.step()
    ids = source.core.scheduler.kv.get_block_ids("s")
    memory = d.core.runner.kv_cache.memory
    memory[torch.tensor(message.block_ids)] = source.core.runner.kv_cache.memory[torch.tensor(ids)]
    run(source)


@pytest.fixture(scope="module")
def source(tiny_model: Path) -> Node:
    return Node(tiny_model, None, kv_layout="cross_layer", **OPTIONS)


@pytest.mark.parametrize(
    "answers",
    [[DONE], [DONE, DONE], [DONE, encode(Failed("r", "x"))], [encode(Done("nobody", 1, 1, 1.0, 1.0)), DONE]],
    ids=["once", "twice", "then failed", "after one for nobody"],
)
def test_done(d: Node, fake: FakeP, source: Node, expected: list[int], answers: list[bytes]):
    received = d.core.connector.stats().received
    give(source, d, ask(d, fake))
    for answer in answers:
        fake.say(answer)
    assert finish(d) == expected
    assert d.core.connector.stats().received == received + 1
    assert fake.hear(0) is None  # all has come: there is nothing to cancel


@pytest.mark.parametrize("late", [[DONE], [encode(Failed("r", "again"))], [DONE, DONE]], ids=["Done", "Failed", "2"])
def test_failed_and_then_something_else(d: Node, fake: FakeP, expected: list[int], late: list[bytes]):
    failures = d.core.connector.stats().receive_failures
    ask(d, fake)
    for answer in [encode(Failed("r", "no")), *late]:
        fake.say(answer)
    assert finish(d) == expected
    assert d.core.connector.stats().receive_failures == failures + 1


@pytest.mark.parametrize("answer", [DONE, encode(Failed("r", CANCELLED))], ids=["Done", "Failed"])
def test_an_answer_after_an_abort(d: Node, fake: FakeP, answer: bytes):
    ask(d, fake)
    d.core.abort_requests(["r"])
    for _ in range(20):
        d.step()
    assert d.core.scheduler.reclaiming == {"r"} and fake.hear() == Cancel(VERSION, "r")
    fake.say(answer)


def test_done_for_a_transfer_of_another_p(d: Node, fake: FakeP, expected: list[int]):
    """What one P says is not taken for another's answer."""
    ask(d, fake)
    second = FakeP()
    d.decode("s", PROMPT, second.port)
    d.step()
    assert isinstance(second.hear(), Pull)
    second.say(DONE)
    second.say(encode(Failed("s", "no")))
    assert finish(d) == expected
    run(d, until=lambda: "s" in d.ended)
    assert d.tokens["s"] == expected
    second.close()
    fake.close()


@pytest.mark.parametrize("host", ["a b", "*", "-", "ä.invalid", "[::1", "host.invalid", "1.2.3.4.5", "x" * 300, "\0"])
def test_an_address_that_is_none(d: Node, expected: list[int], host: str):
    """P8: D computes it, and serves others."""
    params = KVTransferParams(do_remote_prefill=True, remote_host=host, remote_port=9, transfer_id="r")
    d.add("r", PROMPT, params)
    assert finish(d) == expected


def test_no_thread_is_left(tiny_model: Path):
    before = set(threading.enumerate())
    p, d = Node(tiny_model, "prefill", **OPTIONS), Node(tiny_model, "decode", **OPTIONS)
    p.prefill("r", PROMPT)
    d.decode("r", PROMPT, p)
    run(p, d)
    for node in p, d:
        node.core.close()
    assert set(threading.enumerate()) <= before
