"""The side channel spoken by hand, and a transport that writes when the test says so."""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import zmq

from nanopd.connector.mooncake import _prompt_hash
from nanopd.connector.protocol import VERSION, Cancel, Done, Failed, Pull
from nanopd.connector.transport import Piece, Transport
from nanopd.request import Request
from tests.connector.pair import Node

encode = msgspec.msgpack.encode
SECONDS = 8.0  # the longest that anybody waits here for a message that has to come


class Dealer:
    """A D that says what it likes."""

    def __init__(self, p: Node) -> None:
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.connect(f"tcp://127.0.0.1:{p.core.connector.port}")

    def say(self, *frames: bytes) -> None:
        self.socket.send_multipart(list(frames))

    def hear(self, seconds: float = SECONDS) -> Done | Failed | None:
        if not self.socket.poll(int(seconds * 1000)):
            return None
        return msgspec.msgpack.decode(self.socket.recv(), type=Done | Failed)

    def ask(self, *frames: bytes) -> Done | Failed | None:
        self.say(*frames)
        return self.hear()

    def close(self) -> None:
        self.socket.close(linger=0)


class FakeP:
    """A P that says what it likes."""

    def __init__(self) -> None:
        self.socket = zmq.Context.instance().socket(zmq.ROUTER)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.peer = b""

    def hear(self, seconds: float = SECONDS) -> Pull | Cancel | None:
        """The next message; `say` answers whoever sent it."""
        if not self.socket.poll(int(seconds * 1000)):
            return None
        self.peer, frame = self.socket.recv_multipart()
        return msgspec.msgpack.decode(frame, type=Pull | Cancel)

    def say(self, *frames: bytes) -> None:
        self.socket.send_multipart([self.peer, *frames])

    def close(self) -> None:
        self.socket.close(linger=0)


class Gate:
    """P's transport, made to wait: each write stands still until it is let go, then all of it is written, whatever has
    been cancelled since. So is a batch that Mooncake has in its hands already."""

    def __init__(self, real: Transport) -> None:
        self.real, self.session = real, real.session
        self.begun = threading.Semaphore(0)  # counts the writes that have come here
        self.may_write = threading.Event()
        self.written = 0

    @classmethod
    def before(cls, p: Node) -> "Gate":
        producer = p.core.connector.producer
        producer._transport = gate = cls(producer._transport)
        return gate

    def write(self, session: str, pieces: Iterable[Piece], cancelled: Callable[[], bool]) -> None:
        self.begun.release()
        assert self.may_write.wait(60)
        self.real.write(session, pieces, lambda: False)
        self.written += 1

    def wait(self, *nodes: Node, seconds: float = SECONDS) -> None:
        """Steps the nodes until a write has come."""
        deadline = time.monotonic() + seconds
        while not self.begun.acquire(timeout=0.001):
            for node in nodes:
                node.step()
            assert time.monotonic() < deadline


def pull(p: Node, d: Node, request: Request, **changes: Any) -> Pull:
    """What D would send for all blocks of a request, into the last blocks of its memory; `changes` spoil it."""
    layout = d.core.connector.producer._layout if d.core.connector.producer else p.core.connector.producer._layout
    count = -(-request.num_prompt_tokens // layout.block_size)
    fields: dict[str, Any] = {
        "version": VERSION,
        "transfer_id": request.kv_transfer_params.transfer_id,
        "session": d.core.connector.transport.session,
        "base_address": d.core.runner.kv_cache.memory.data_ptr(),
        "layout": msgspec.structs.replace(layout, num_blocks=len(d.core.scheduler.kv.pool.blocks)),
        "num_tokens": request.num_prompt_tokens,
        "prompt_hash": _prompt_hash(request),
        "first_block": 0,
        "block_ids": list(range(layout.num_blocks - count, layout.num_blocks)),
    }
    return Pull(**fields | changes)
