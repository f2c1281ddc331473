"""The engine core in a process of its own, and the EngineClient through which the server talks to it.

    server (asyncio)                               engine core
    EngineClient  -- Add, Abort …, Inspect, Stop -->  run: take in messages, step(), send what is new
                  <-- EngineInfo, Outputs, State --

So the model computes while the server parses, detokenizes and writes to its clients. The two are joined by a ZMQ socket
in a private directory; messages are msgpack, typed, and decoded strictly: nothing is unpickled. Either side ends when
the other is gone. This file knows nothing about HTTP or text; torch is imported where the engine core is, and only there.
"""

import asyncio
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec
import zmq.asyncio
from msgspec.msgpack import decode, encode

from nanopd.config import EngineConfig, KVTransferConfig, SamplingParams, UserError
from nanopd.connector.protocol import KVTransferParams
from nanopd.core.debug import describe
from nanopd.core.output import EngineCoreOutput, SchedulerStats, TransferStats
from nanopd.engine.llm import EngineInfo
from nanopd.request import Request, RequestMetrics

if TYPE_CHECKING:
    from nanopd.engine.core import EngineCore


class Message(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """One message. EngineInfo is one too: the first that comes from the core, when it is ready."""


class Add(Message):
    """A new request: what `Request` is made of, and since when the server has had it."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: list[int]
    cache_salt: str | None
    kv_transfer_params: KVTransferParams | None
    priority: int
    turn: int | None
    metrics: RequestMetrics


class Abort(Message):
    """Nobody waits for these any more."""

    request_ids: list[str]


class AbortTurn(Message):
    """Nobody waits for this answer of a session any more."""

    request_id: str
    turn: int


class Inspect(Message):
    """Asks for a State."""


class Stop(Message):
    """The server ends."""


class Outputs(Message):
    """What a step has brought, and how things stand after it. Sent when something is new."""

    outputs: list[EngineCoreOutput]
    scheduler: SchedulerStats
    transfer: TransferStats | None


class State(Message):
    """What the scheduler holds, for people to look at."""

    state: dict[str, Any]


# ---------------------------------------------------------------- the server's end


class EngineClient:
    """Takes requests like an EngineCore; what comes of them is received. `died` ends when the process does. `directory`,
    with the socket, can go when the first message has come: both have it open."""

    async def start(self, *configs: EngineConfig | KVTransferConfig) -> None:
        """Starts the process. It says EngineInfo when it is ready; a mistake of the user's ends it with exit code 2."""
        self.directory = tempfile.TemporaryDirectory(prefix="nanopd-")  # only its owner may look inside
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        self._socket.set_hwm(0)  # what is on its way is bounded by how many requests the server lets in
        self._socket.bind(address := f"ipc://{self.directory.name}/core")
        start = address, os.getpid(), logging.getLogger().getEffectiveLevel(), *configs
        program = sys.executable, "-P", "-m", "nanopd.engine.process", msgspec.json.encode(start).decode()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # the modules that we use ourselves
        # In a session of its own: Ctrl-C in a terminal reaches the server alone, which then says Stop when it is time.
        self._process = await asyncio.create_subprocess_exec(*program, env=environment, start_new_session=True)
        self.died = asyncio.create_task(self._process.wait())

    async def receive(self) -> EngineInfo | Outputs | State:
        return decode(await self._socket.recv(), type=EngineInfo | Outputs | State)

    def send(self, message: Message) -> None:
        self._socket.send(encode(message))

    def add_request(self, request: Request) -> None:
        ids, eos, r = request.token_ids.tolist(), list(request.eos_token_ids), request
        more = r.cache_salt, r.kv_transfer_params, r.priority, r.turn, r.metrics
        self.send(Add(r.request_id, ids, r.sampling_params, eos, *more))

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        if ids := list(request_ids):
            self.send(Abort(ids))

    def abort_turn(self, request_id: str, turn: int) -> None:
        self.send(AbortTurn(request_id, turn))

    async def stop(self, grace: float) -> None:
        """Ends the process, by force after `grace` seconds."""
        self.send(Stop())
        await asyncio.wait({self.died}, timeout=grace)
        self.kill()
        await self.died
        self._socket.close(linger=0)

    def kill(self) -> None:
        self.directory.cleanup()
        if self._process.returncode is None:
            self._process.kill()


# ---------------------------------------------------------------- the engine core's end


def main(address: str, server_pid: int, log_level: int, engine: EngineConfig, kv_transfer: KVTransferConfig) -> int:
    """The process. Returns its exit code when the server says Stop or is gone. If a step raises, that ends it."""
    from nanopd.engine.core import EngineCore

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # systemd sends it to both; the server decides what happens
    logging.basicConfig(level=log_level, format="%(message)s", stream=sys.stderr)
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.linger = 1000
    socket.connect(address)
    try:
        core = EngineCore(engine, kv_transfer)
    except (UserError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    try:
        core.warm_up()
        core.add_request(Request("warm-up", [0], SamplingParams(max_tokens=2, ignore_eos=True, seed=0)))
        while core.has_unfinished_requests():
            core.step()
        socket.send(encode(EngineInfo.of(core)))
        run(core, socket, server_pid)
    finally:
        core.close()
    return 0


def run(core: "EngineCore", socket: "zmq.Socket[bytes]", server_pid: int) -> None:
    """Messages come in between two steps; without work it sleeps until one comes, and looks for the server meanwhile.

    If nothing is left but blocks that a peer may touch (P4), a look at them now and then will do: a peer that stands still
    must not cost us a core.
    """
    said, s = b"", core.scheduler
    while os.getppid() == server_pid:
        news: list[EngineCoreOutput] = []
        wait_ms = 0 if s.num_active or (s.connector and s.connector.has_news()) else 10 if s.reclaiming else 1000
        while socket.poll(wait_ms):
            wait_ms = 0
            match decode(socket.recv(), type=Add | Abort | AbortTurn | Inspect | Stop):
                case Add() as add:
                    *fields, metrics = msgspec.structs.astuple(add)
                    request = Request(*fields)
                    request.metrics = metrics
                    try:
                        core.add_request(request)
                    except UserError as error:
                        why = str(error)
                        news.append(EngineCoreOutput(add.request_id, [], metrics, None, "error", why, turn=add.turn))
                case Abort(request_ids):
                    core.abort_requests(request_ids)
                case AbortTurn(request_id, turn):
                    core.abort_turn(request_id, turn)
                case Inspect():
                    socket.send(encode(State(describe(core.scheduler))))
                case Stop():
                    return
        news += core.step() if core.has_unfinished_requests() else []
        outputs = encode(Outputs(news, *core.stats()))
        if outputs != said:
            socket.send(said := outputs)


if __name__ == "__main__":
    sys.exit(main(*msgspec.json.decode(sys.argv[1], type=tuple[str, int, int, EngineConfig, KVTransferConfig])))
