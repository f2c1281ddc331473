"""Whatever comes over the network is understood or refused with a clean error: side channel, engine core's socket, HTTP.

Most inputs are valid messages with some bytes changed, cut, doubled or swapped: those come far. Hypothesis builds the
others, with values of every kind in every field. They are counted: 20,000 here, a million in the slow one.
"""

import contextlib
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanopd.config import KVTransferConfig, SamplingParams, UserError
from nanopd.connector.producer import Producer, Stage
from nanopd.connector.protocol import BAD_MESSAGE, VERSION, Cancel, Done, Failed, Layout, Pull, transfer_of
from nanopd.core.output import TransferStats
from nanopd.serve.api import Answer, ApiError, parse
from tests.connector.pair import Node, alone, run
from tests.connector.wire import Dealer
from tests.serve.conftest import Server, server

__all__ = ["server"]

encode = msgspec.msgpack.encode
LAYOUT = Layout("model", "float32", "cross_layer", 16, 1, 4096, 100)
PULL = Pull(VERSION, "x" * 32, "127.0.0.1:12345", 2**40, LAYOUT, 70, b"h" * 32, 1, [7, 8, 9, 10])
FRAMES = [encode(m) for m in (PULL, Cancel(VERSION, "r"), Done("r", 2**33, 7, 0.5, 1.5), Failed("r", "no room, ä"))]
BODIES: list[dict[str, Any]] = [
    {"prompt": "Once upon a time", "max_tokens": 9, "temperature": 0, "stream": True, "stop": ["a", "b"], "seed": 3},
    {"prompt": [1, 2, 3], "logprobs": 3, "n": 2, "top_p": 0.5, "top_k": 4, "min_p": 0.1, "ignore_eos": True},
    {"prompt": [[1], [2]], "cache_salt": "s", "return_token_ids": True, "stream_options": {"include_usage": True}},
    {"prompt": "x", "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 8998}},
    {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2, "max_completion_tokens": 3},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "tools": [], "tool_choice": "none"},
]
STRANGE = [
    None,
    True,
    -1,
    0,
    2**63,
    2**70,
    0.5,
    -0.0,
    1e400,
    "",
    "x" * 1000,
    "\ud800",
    "\0",
    [],
    [[]],
    {},
    [None],
    {"a": 1},
]


def mutations(valid: list[bytes], seed: int, count: int) -> Iterator[bytes]:
    """So many frames, each a valid one with something wrong."""
    rng = random.Random(seed)
    for _ in range(count):
        frame = bytearray(rng.choice(valid))
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            at, how = rng.randrange(len(frame) + 1), rng.randrange(6)
            if how == 0:
                frame[at : at + 1] = bytes([rng.randrange(256)])
            elif how == 1:
                frame[at:at] = rng.randbytes(rng.choice((1, 1, 2, 8)))
            elif how == 2:
                del frame[at : at + rng.choice((1, 1, 4))]
            elif how == 3:
                frame = frame[:at]
            elif how == 4:
                start = rng.randrange(len(frame) + 1)
                frame[at:at] = frame[start : start + 16]
            else:
                frame[at:at] = b"\x91" * rng.choice((10, 100)) if rng.random() < 0.2 else b"\xff"
            frame = frame or bytearray(b"\x00")
        yield bytes(frame)


def bodies(seed: int, count: int) -> Iterator[bytes]:
    """HTTP bodies: half of them with a byte wrong somewhere, half with a value of another kind."""
    rng = random.Random(seed)
    raw = [json.dumps(body).encode() for body in BODIES]
    names = sorted(
        {name for body in BODIES for name in body} | SamplingParams.__dataclass_fields__.keys() | {"tools", "x"}
    )
    yield from mutations(raw, seed, count // 2)
    for _ in range(count - count // 2):
        body = dict(rng.choice(BODIES))
        for _ in range(rng.choice((1, 1, 2))):
            body[rng.choice(names)] = rng.choice(STRANGE)
        yield json.dumps(body).encode()


# ---------------------------------------------------------------- what is done with an input


class Silent:
    """A transport that writes nothing, for a Producer that is fed by hand."""

    session = "127.0.0.1:1"

    def write(self, session: str, pieces: Any, cancelled: Any) -> None:
        """Must never be asked for more than there is."""
        for piece in pieces:
            assert 0 < piece.num_bytes <= 2**40 and piece.target > 0


class Fed:
    """A Producer whose messages we hand over ourselves, and whose answers we take. Its own loop stands still."""

    def __init__(self) -> None:
        self.producer = Producer(KVTransferConfig("prefill", kv_port=0), Silent(), LAYOUT, 2**30, TransferStats())
        self.producer.close()
        self.answers: Counter[str] = Counter()
        self.producer._reply = self._answer  # type: ignore[method-assign]
        self.producer._expire_later = lambda *_: None  # type: ignore[method-assign]
        self.decoder = msgspec.msgpack.Decoder(Pull | Cancel)

    def _answer(self, peer: bytes, answer: Done | Failed) -> None:
        assert isinstance(answer, (Done, Failed)) and len(encode(answer)) < 2**20
        self.answers[type(answer).__name__] += 1

    def __call__(self, frame: bytes) -> None:
        try:
            message = self.decoder.decode(frame)
        except BAD_MESSAGE as error:
            self.answers[type(error).__name__] += 1
            assert isinstance(transfer_of(frame), str)
            return
        self.producer._on_message(b"peer", message)
        if len(self.producer._sends) > 1000:
            self.producer._sends.clear()


D_DECODER = msgspec.msgpack.Decoder(Done | Failed)


def d_hears(frame: bytes) -> None:
    """What D does with an answer of P."""
    with contextlib.suppress(*BAD_MESSAGE):
        assert isinstance(D_DECODER.decode(frame), (Done, Failed))


def is_asked(raw: bytes) -> None:
    """What the server does with a body until it has a request for the engine."""
    for chat in (False, True):
        try:
            body, sampling = parse(raw, chat)
            SamplingParams(**({"max_tokens": 100} if chat else {}) | sampling)
            Answer("id", "model", chat, body, None)
        except ApiError as error:
            if error.status >= 500:
                raise
        except (UserError, msgspec.DecodeError, RecursionError):
            pass


def feed(count: int, seed: int) -> dict[str, int]:
    """A half of the inputs to P's side channel, a quarter to D's, a quarter to the server. Returns how many there were."""
    fed = Fed()
    targets: list[tuple[str, Callable[[bytes], None], Iterator[bytes]]] = [
        ("P", fed, mutations(FRAMES, seed, count // 2)),
        ("D", d_hears, mutations(FRAMES, seed + 1, count // 4)),
        ("HTTP", is_asked, bodies(seed + 2, count // 4)),
    ]
    numbers = {}
    for name, hear, inputs in targets:
        numbers[name] = 0
        for each in inputs:
            hear(each)
            numbers[name] += 1
    assert fed.answers["Failed"] > count / 1000, "some were messages, and were refused for what they said"
    assert fed.answers["ValidationError"] > count / 100 and fed.answers["DecodeError"] > count / 100
    return numbers


def test_twenty_thousand_inputs():
    assert sum(feed(20_000, 1).values()) == 20_000


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_inputs():
    numbers = feed(1_000_000, random.randrange(2**32))
    print(numbers)
    assert sum(numbers.values()) >= 1_000_000


# ---------------------------------------------------------------- built by hypothesis

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
COMMON = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))


@given(st.sampled_from([PULL, Cancel(VERSION, "r")]), st.data())
@COMMON
def test_any_value_in_any_field(message: Pull | Cancel, data: st.DataObject):
    fields: dict[str, Any] = msgspec.to_builtins(message, builtin_types=(bytes,))
    for name in data.draw(st.lists(st.sampled_from(sorted(fields)), max_size=3)):
        fields[name] = data.draw(VALUES)
    if "layout" in fields and data.draw(st.booleans()):
        fields["layout"] = msgspec.to_builtins(LAYOUT) | {
            data.draw(st.sampled_from(LAYOUT.__struct_fields__)): data.draw(VALUES)
        }
    _FED(encode(fields))
    d_hears(encode(fields))


_FED = Fed()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(
    st.sampled_from(BODIES),
    st.dictionaries(st.sampled_from([*SamplingParams.__dataclass_fields__, "prompt", "messages"]), JSON),
)
@COMMON
def test_any_value_in_any_option(body: dict[str, Any], changes: dict[str, Any]):
    is_asked(json.dumps(body | changes).encode())


# ---------------------------------------------------------------- through real sockets


def test_a_live_p(tiny_model: Path, made: list[Node]):
    """2,000 frames from several peers, some of which vanish; P answers each that names a transfer, and serves afterwards."""
    p, d = Node(tiny_model, "prefill"), Node(tiny_model, "decode")
    made += [p, d]
    for i in range(10):
        dealer = Dealer(p)
        for frame in mutations(FRAMES, i, 200):
            dealer.say(frame)
        heard = dealer.hear()
        assert isinstance(heard, Failed)
        dealer.close()
    prompt = list(range(50))
    p.prefill("mine", prompt)  # "r" may have been asked for by one of those: some of their frames were whole after all
    d.decode("mine", prompt, p)
    run(p, d)
    assert d.tokens == alone(tiny_model, [("mine", prompt)]) and d.core.connector.stats().received == 1
    p.core.scheduler.check_invariants()
    assert p.core.connector.producer._thread.is_alive() and all(
        s.plan is None for s in p.core.connector.producer._sends.values()
    )


def test_a_live_server(server: Server):
    """300 bodies: a completion, or an error in OpenAI's form; never 500."""
    seen: Counter[int] = Counter()
    for i, raw in enumerate(bodies(9, 300)):
        path = "/v1/chat/completions" if b"messages" in raw else "/v1/completions"
        status, answer, _ = server.request(path, raw)
        seen[status] += 1
        assert status in (200, 400, 404, 422, 413), (i, raw, answer)
        if status != 200:
            assert answer["error"]["message"] and answer["error"].keys() == {"message", "type", "param", "code"}
    assert seen[200] > 2 and seen[400] > 100, seen
    server.wait_empty()


def test_stages_are_all_known():
    """What P's engine tells its sender is no input from outside; if there are more stages, this file should know."""
    assert len(Stage) == 4
