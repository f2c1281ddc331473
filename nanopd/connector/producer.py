"""P's worker half: keeps the blocks of computed prompts until a D has fetched them, and writes them into D's memory.

One background thread runs an event loop that owns everything here: the side channel, the clock, the table of transfers.
The engine's thread only posts `SendPlan`s into it and takes out the ids of finished requests, so a long step delays no
transfer. Ten coroutines take the next transfer that has blocks to write and hand the writing to ten threads; at most one
of them works for a transfer, so its writes are in order. States: SEND_TRANSITIONS; rules P1-P5; lesson 11.
"""

import asyncio
import contextlib
import enum
import itertools
import logging
import threading
import time
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
import zmq.asyncio

from nanopd.config import KVTransferConfig, UserError
from nanopd.connector import protocol
from nanopd.connector.protocol import CANCELLED, VERSION, Cancel, Done, Failed, Pull, SendState
from nanopd.connector.transport import TransferError, Transport, pieces_of
from nanopd.core.output import TransferStats
from nanopd.trace.events import Tracer, Transfer, ignore

logger = logging.getLogger(__name__)

NUM_SENDERS = 10
ROOM_GRACE, ROOM_PAUSE = 1.0, 0.1  # seconds: how long a D may take to ask, even so; between two that are given up
_REMEMBERED = 10_000  # transfers that have ended, so that whoever asks too late hears it at once


class Stage(enum.Enum):
    """How far P's request is."""

    STARTED = "started"  # it has got blocks; again after a preemption
    CHUNK = "chunk"  # some of its blocks are full (kv_push per_chunk)
    COMPLETE = "complete"  # it has ended, and its blocks stay until `take_finished`
    ABORTED = "aborted"  # it has ended without a whole prompt; the same


@dataclass(frozen=True, slots=True)
class SendPlan:
    """What the scheduler half says of one prompt."""

    transfer_id: str
    request_id: str
    num_tokens: int  # of the whole prompt
    prompt_hash: bytes
    stage: Stage = Stage.STARTED
    block_ids: list[int] | tuple[int, ...] = ()  # of what is computed, from the start of the prompt
    prefill_seconds: float = 0.0


@dataclass
class Send:
    """One transfer."""

    transfer_id: str
    state: SendState
    trace: Tracer
    plan: SendPlan | None = None
    pull: Pull | None = None
    peer: bytes = b""  # D on the side channel
    num_sent: int = 0  # blocks written, or being written, from the start of the prompt
    held_since: float = 0.0  # time.monotonic()
    writing: bool = False
    failure: str | None = None  # why it has to end as soon as nobody writes
    num_bytes: int = 0
    num_pieces: int = 0
    seconds: float = 0.0

    def to(self, state: SendState, why: str = "") -> None:
        assert state in protocol.SEND_TRANSITIONS[self.state], f"{self.state} -> {state}"
        self.state = state
        self.trace(Transfer(self.plan.request_id if self.plan else "", self.transfer_id, "send", state.value, why))


class Producer:
    """All sends of an engine.

    Args:
        config: port of the side channel, order of the sends, how long blocks are held.
        transport: writes.
        layout: this engine's KV memory, which starts at `address`.
        stats: counted in here.
        trace: is told how far each send is, by the loop's thread.

    Raises:
        UserError: the port is taken.
    """

    def __init__(
        self,
        config: KVTransferConfig,
        transport: Transport,
        layout: protocol.Layout,
        address: int,
        stats: TransferStats,
        trace: Tracer = ignore,
    ) -> None:
        self._config, self._transport, self._layout, self._address = config, transport, layout, address
        self._stats, self._trace = stats, trace
        self._sends: dict[str, Send] = {}  # by transfer id
        self._ended: OrderedDict[str, str] = OrderedDict()  # transfer id -> why nothing more comes of it
        self._finished: deque[str] = deque()  # ids of requests whose blocks nobody reads any more
        self._jobs: asyncio.PriorityQueue[tuple[int, int, Send]] = asyncio.PriorityQueue()
        self._numbers = itertools.count()
        self._made_room_at = 0.0
        self._pool = ThreadPoolExecutor(NUM_SENDERS, thread_name_prefix="kv-sender")
        self._closing = threading.Event()
        self._socket = zmq.asyncio.Context().socket(zmq.ROUTER)
        self._socket.set(zmq.MAXMSGSIZE, protocol.MAX_FRAME)
        self._socket.set(zmq.ROUTER_HANDOVER, 1)  # a D whose connection was lost comes back under its name
        self._socket.set(zmq.LINGER, 200)
        self._socket.set(zmq.IPV6, ":" in config.kv_host)
        try:
            self._socket.bind(where := protocol.tcp_address(config.kv_host, config.kv_port or "*"))
        except zmq.ZMQError as error:
            raise UserError(f"The side channel cannot use {where} ({error}); see --kv-host, --kv-port.") from error
        self.port = int(bytes(self._socket.get(zmq.LAST_ENDPOINT)).rsplit(b":", 1)[1])
        self._loop = asyncio.new_event_loop()
        self._main_task = self._loop.create_task(self._main())
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._main_task,), daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- the engine's thread

    def update(self, plan: SendPlan) -> None:
        """P's request has come to this stage; the blocks named are in the cache."""
        self._loop.call_soon_threadsafe(self._update, plan)

    def make_room(self) -> None:
        """The engine is stuck for want of blocks. Without this, P and D can wait for each other until a timeout: D holds
        its blocks for a prompt that P cannot begin, since P holds its own for one that D has no room to ask for."""
        self._loop.call_soon_threadsafe(self._make_room)

    def take_finished(self) -> set[str]:
        """Requests whose blocks can be freed."""
        if not self._thread.is_alive():
            raise RuntimeError("the thread that sends KV blocks has died")
        return {self._finished.popleft() for _ in range(len(self._finished))}

    def close(self) -> None:
        """Ends the threads. A write that is under way ends with its batch."""
        self._closing.set()
        self._loop.call_soon_threadsafe(self._main_task.cancel)
        self._pool.shutdown()
        self._thread.join(timeout=5)

    # ---------------------------------------------------------------- the loop's thread

    async def _main(self) -> None:
        with self._socket, contextlib.suppress(asyncio.CancelledError):  # until `close`
            await asyncio.gather(self._listen(), *(self._send_next() for _ in range(NUM_SENDERS)))

    def _update(self, plan: SendPlan) -> None:
        send, transfer_id = self._sends.get(plan.transfer_id), plan.transfer_id
        if send is None and plan.stage is Stage.STARTED and self._ended.get(transfer_id) != CANCELLED:
            send = self._sends[transfer_id] = Send(transfer_id, SendState.COMPUTING, self._trace)
            self._ended.pop(transfer_id, None)
        if send is None or (send.plan and send.plan.request_id != plan.request_id):
            # D does not want it any more, or another request has taken this transfer id: nobody will read these blocks.
            if send is None and plan.stage is Stage.ABORTED:
                self._remember(transfer_id, "the prefill was aborted")
            if plan.stage in (Stage.COMPLETE, Stage.ABORTED):
                self._finished.append(plan.request_id)
                if self._ended.get(transfer_id) == CANCELLED:
                    del self._ended[transfer_id]  # this was the request it was about
            return
        send.plan = plan
        if plan.stage is Stage.STARTED:
            if send.state is SendState.ASKED:
                send.to(SendState.COMPUTING)
            send.num_sent = 0  # after a preemption: what was read from the old blocks may have been overwritten
        elif plan.stage is Stage.ABORTED:
            send.failure = send.failure or "the prefill was aborted"
        elif plan.stage is Stage.COMPLETE and send.pull is None and send.state is SendState.COMPUTING:
            send.to(SendState.HELD)
            send.held_since = time.monotonic()
            self._expire_later(send)
        self._advance(send)

    def _advance(self, send: Send) -> None:
        """Queues the transfer if there is something to write and nobody writes it yet; ends it if all is written."""
        plan, pull, transfer_id = send.plan, send.pull, send.transfer_id
        if send.writing or transfer_id not in self._sends:
            return
        if send.failure is not None:
            self._end(send, Failed(transfer_id, send.failure))
        elif plan is None or pull is None:
            return
        elif (pull.num_tokens, pull.prompt_hash) != (plan.num_tokens, plan.prompt_hash):
            self._fail(send, "the prompt of this transfer is another one")
        elif max(send.num_sent, pull.first_block) < len(plan.block_ids):
            if send.state is not SendState.SENDING:
                send.to(SendState.SENDING)
            send.writing = True
            priority = len(pull.block_ids) if self._config.kv_send_order == "shortest" else 0
            self._jobs.put_nowait((priority, next(self._numbers), send))
        elif plan.stage is Stage.COMPLETE:
            totals = send.num_bytes, send.num_pieces, send.seconds, plan.prefill_seconds
            self._end(send, Done(transfer_id, *totals))

    def _make_room(self) -> None:
        """Gives up the prompt that was held longest, one at a time; its D will compute it itself."""
        now = time.monotonic()
        if now > self._made_room_at + ROOM_PAUSE:
            for send in self._sends.values():  # oldest first
                if send.state is SendState.HELD and now > send.held_since + ROOM_GRACE:
                    self._made_room_at = now
                    self._fail(send, "this node needed the blocks for others")
                    return

    async def _send_next(self) -> None:
        """One of the senders: takes the next transfer that has blocks to write, writes, again and again."""
        while True:
            *_, send = await self._jobs.get()
            plan, pull = send.plan, send.pull
            assert plan is not None and pull is not None
            start, end = max(send.num_sent, pull.first_block), len(plan.block_ids)
            send.num_sent = end  # before it is written: if the prompt is preempted meanwhile, 0 is what holds
            theirs = pull.block_ids[start - pull.first_block : end - pull.first_block]
            mine = self._layout, self._address, plan.block_ids[start:end]
            pieces = pieces_of(*mine, pull.layout, pull.base_address, theirs)
            begin = time.perf_counter()

            def cancelled(send: Send = send) -> bool:
                return send.failure is not None or self._closing.is_set()

            try:
                await self._loop.run_in_executor(self._pool, self._transport.write, pull.session, pieces, cancelled)
                send.num_bytes += sum(piece.num_bytes for piece in pieces)
                send.num_pieces += len(pieces)
                send.seconds += time.perf_counter() - begin
            except TransferError as error:
                send.failure = send.failure or str(error)
            send.writing = False
            self._advance(send)

    def _fail(self, send: Send, reason: str) -> None:
        """Ends a transfer, at once or as soon as the write under way has ended."""
        send.failure = send.failure or reason
        self._advance(send)

    def _end(self, send: Send, answer: Done | Failed) -> None:
        del self._sends[send.transfer_id]
        self._remember(send.transfer_id, answer.reason if isinstance(answer, Failed) else "it is done")
        if isinstance(answer, Done):
            send.to(SendState.DONE, f"{send.num_bytes:,} bytes in {send.num_pieces} pieces")
            self._stats.sent += 1
            self._stats.sent_bytes += send.num_bytes
            self._stats.sent_pieces += send.num_pieces
            self._stats.sent_seconds += send.seconds
        else:
            send.to(SendState.FAILED, answer.reason)
            self._stats.send_failures += 1
            whose = f"{send.transfer_id} (request {send.plan and send.plan.request_id})"
            logger.warning(f"transfer {whose} failed: {answer.reason}; its blocks are let go")
        if send.peer:
            self._reply(send.peer, answer)
        if send.plan is not None and send.plan.stage in (Stage.COMPLETE, Stage.ABORTED):
            self._finished.append(send.plan.request_id)

    def _expire_later(self, send: Send) -> None:
        """Nobody waits for ever (rule P3): ends the transfer if it is still in this state after the time allowed."""
        seconds, state = self._config.kv_hold_timeout, send.state

        def expire() -> None:
            if send.state is state:
                self._fail(send, f"it was not {'fetched' if send.plan else 'computed'} in {seconds} s")

        self._loop.call_later(seconds, expire)

    def _remember(self, transfer_id: str, why: str) -> None:
        self._ended[transfer_id] = why
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    # ---------------------------------------------------------------- the side channel

    def _reply(self, peer: bytes, answer: Done | Failed) -> None:
        self._socket.send_multipart([peer, msgspec.msgpack.encode(answer)], zmq.NOBLOCK)

    async def _listen(self) -> None:
        decoder = msgspec.msgpack.Decoder(Pull | Cancel)
        while True:
            peer, *frames = await self._socket.recv_multipart()
            try:
                self._on_message(peer, decoder.decode(frames[-1]))
            except protocol.BAD_MESSAGE as error:
                logger.warning(f"message on the side channel refused: {error}")
                reason = f"this node speaks version {VERSION} of the protocol, and did not understand: {error}"
                self._reply(peer, Failed(protocol.transfer_of(frames[-1]), reason))

    def _on_message(self, peer: bytes, message: Pull | Cancel) -> None:
        transfer_id = message.transfer_id
        send = self._sends.get(transfer_id)
        reason = CANCELLED if isinstance(message, Cancel) else self._refusal(message)
        if send is not None and send.peer not in (b"", peer):
            self._reply(peer, Failed(transfer_id, "another node has asked for it"))
        elif reason is not None and send is not None:
            send.peer = peer
            self._fail(send, reason)
        elif reason is not None:
            self._remember(transfer_id, CANCELLED)  # should P's request still come: D does not want it
            self._reply(peer, Failed(transfer_id, reason))
        elif isinstance(message, Pull):
            if send is None:
                send = self._sends[transfer_id] = Send(transfer_id, SendState.ASKED, self._trace)
                self._expire_later(send)
            send.peer, send.pull = peer, message
            self._advance(send)

    def _refusal(self, pull: Pull) -> str | None:
        """Why this Pull cannot be served, if it can't (rules P1, P2)."""
        mine, theirs = (msgspec.structs.asdict(layout) for layout in (self._layout, pull.layout))
        if pull.version != VERSION:
            return f"this node speaks version {VERSION} of the protocol, not {pull.version}"
        if different := [name for name in mine if name != "num_blocks" and mine[name] != theirs[name]]:
            return "; ".join(f"{name} is {mine[name]} here and {theirs[name]} there" for name in different)
        count = -(-pull.num_tokens // self._layout.block_size) - pull.first_block
        if len(pull.block_ids) != count or count < 1:
            return f"{pull.num_tokens} tokens from block {pull.first_block} on do not fill {len(pull.block_ids)} blocks"
        if max(pull.block_ids) >= pull.layout.num_blocks:
            return f"a block id is not below {pull.layout.num_blocks}"
        if pull.base_address + pull.layout.num_runs * pull.layout.num_blocks * pull.layout.run_bytes >= 2**63:
            return "no memory is that large"
        return self._ended.get(pull.transfer_id)
