"""D's worker half: asks P for blocks, and knows when they have come or when P can no longer write into them.

It has no thread: it is called at the start and the end of each step, sends without waiting and looks what has come. The
bytes themselves arrive without it, written by P's transport. There is one connection to each P. If it is lost, P may have
died, or may live and write on: loads over it are given up, and a new connection finds out which. A P that is not there fails
only its own transfers (rule P6).

    start ---> ASKED --- Done ----------------------------------> DONE
                 |------ Failed --------------------------------> FAILED     recompute
                 '------ timeout, abort, loss  --> RECLAIMING -> FAILED     recompute at once, in other blocks; these
                                                                             stay out of use until P cannot write (P4);
                                                                             it is asked again and again
"""

import contextlib
import logging
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from nanopd.connector import protocol
from nanopd.connector.protocol import VERSION, Cancel, Done, Failed, Pull, RecvState
from nanopd.core.output import KVConnectorOutput, TransferStats
from nanopd.trace.events import Tracer, Transfer, ignore

logger = logging.getLogger(__name__)

Address = tuple[str, int]
# When P is gone, bytes that its machine had sent may still be on their way into our memory.
GRACE = 1.0


@dataclass
class Recv:
    """One load."""

    request_id: str
    peer: Address
    deadline: float  # time.monotonic()
    transfer_id: str
    trace: Tracer = ignore
    state: RecvState = RecvState.ASKED
    gone_at: float | None = None  # when it was found that nobody is at P's address any more

    def to(self, state: RecvState, why: str = "") -> None:
        assert state in protocol.RECV_TRANSITIONS[self.state], f"{self.request_id}: {self.state} -> {state}"
        self.state = state
        self.trace(Transfer(self.request_id, self.transfer_id, "recv", state.value, why))


@dataclass
class Peer:
    """The connection to one P, and what we still want to hear from it, by transfer id."""

    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    recvs: dict[str, Recv] = field(default_factory=dict)
    connected: bool = False  # it has been, once: else nothing that we have said can have reached anybody


class Consumer:
    """All loads of an engine.

    Args:
        load_timeout: seconds until a load is given up.
        stats: counted in here.
        trace: is told how far each load is.
    """

    def __init__(self, load_timeout: float, stats: TransferStats, trace: Tracer = ignore) -> None:
        self._load_timeout, self._stats, self._trace = load_timeout, stats, trace
        self._name = uuid.uuid4().hex.encode()  # by which P knows us again after a lost connection
        self._context: zmq.Context[Any] = zmq.Context()
        self._peers: dict[Address, Peer] = {}
        self._lost: list[Recv] = []  # their P is gone; they wait until GRACE is over
        self._decoder = msgspec.msgpack.Decoder(Done | Failed)
        self._output = KVConnectorOutput()

    def start(self, request_id: str, address: Address, pull: Pull) -> None:
        """Asks for blocks. A transfer that has been begun already is left alone (see `step_failed`)."""
        deadline = time.monotonic() + self._load_timeout
        recv = Recv(request_id, address, deadline, pull.transfer_id, self._trace)
        try:
            peer = self._peer(address)
        except zmq.ZMQError as error:
            self._fail(recv, f"{error}; this is no address")
            return
        known = peer.recvs.setdefault(pull.transfer_id, recv)
        if known is recv:
            self._trace(Transfer(request_id, pull.transfer_id, "recv", "asked", f"{len(pull.block_ids)} blocks"))
            self._send(peer, pull)
        elif known.request_id != request_id:
            self._fail(recv, "another request has this transfer id")

    def cancel(self, request_id: str, address: Address, transfer_id: str, asked: bool) -> None:
        """The request has ended, or needs nothing from P. Unless all has come already, P is told (rule P5)."""
        recv = self._peers[address].recvs.get(transfer_id) if address in self._peers else None
        if recv is not None and recv.request_id == request_id and recv.state is RecvState.ASKED:
            recv.to(RecvState.RECLAIMING, "not wanted any more")
            self._send(self._peers[address], Cancel(VERSION, transfer_id))
        elif not asked:
            with contextlib.suppress(zmq.ZMQError):
                self._send(self._peer(address), Cancel(VERSION, transfer_id))

    def poll(self) -> KVConnectorOutput:
        """What has come since the last call."""
        now = time.monotonic()
        for address, peer in list(self._peers.items()):
            while (message := self._receive(peer)) is not None:
                self._on_message(peer, message)
            overdue = [recv for recv in peer.recvs.values() if now > recv.deadline]
            for recv in overdue:
                recv.deadline = now + self._load_timeout
                if recv.state is RecvState.RECLAIMING:
                    logger.warning(f"{recv.request_id}: its blocks stay out of use: {recv.peer} may still write")
                self._give_up(peer, recv, f"none in {self._load_timeout} s")
            self._watch(address, peer)
            if overdue and not peer.connected and self._peers.get(address) is peer:
                self._drop(address, peer)  # a name that cannot be found, for one
        for recv in [r for r in self._lost if now > (r.gone_at or 0) + GRACE]:
            self._lost.remove(recv)
            self._fail(recv, "the prefill node is gone")
        output, self._output = self._output, KVConnectorOutput()
        return output

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _peer(self, address: Address) -> Peer:
        """The connection to P, made if there is none. Raises zmq.ZMQError for what is no address."""
        if address in self._peers:
            self._watch(address, self._peers[address])  # what has happened to it since is not about the next load
        if address not in self._peers:
            self._peers[address] = self._connect(address)
        return self._peers[address]

    def _connect(self, address: Address) -> Peer:
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.ROUTING_ID, self._name)
        socket.set(zmq.MAXMSGSIZE, protocol.MAX_FRAME)
        socket.set(zmq.TCP_KEEPALIVE, 1)
        socket.set(zmq.IPV6, ":" in address[0])
        events = zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        peer = Peer(socket, socket.get_monitor_socket(events))  # before it connects: it must not miss that
        try:
            socket.connect(protocol.tcp_address(*address))
        except zmq.ZMQError:
            _close(peer)
            raise
        return peer

    def _send(self, peer: Peer, message: Pull | Cancel) -> None:
        """Never waits: a P whose queue is full answers nothing either, and that is what the timeouts are for."""
        try:
            peer.socket.send(msgspec.msgpack.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            logger.warning("the queue of messages to a prefill node is full: does it stand still?")

    def _receive(self, peer: Peer) -> Done | Failed | None:
        while True:
            try:
                return self._decoder.decode(peer.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return None
            except protocol.BAD_MESSAGE as error:
                logger.warning(f"message from a prefill node ignored: {error}")

    def _on_message(self, peer: Peer, message: Done | Failed) -> None:
        recv = peer.recvs.pop(message.transfer_id, None)
        if recv is None:
            return  # the answer to a release
        if isinstance(message, Failed):
            self._fail(recv, message.reason)
            return
        recv.to(RecvState.DONE, f"{message.num_bytes:,} bytes")
        self._stats.received += 1
        self._stats.received_bytes += message.num_bytes
        self._output.finished_recving.add(recv.request_id)
        names = "num_bytes", "num_pieces", "seconds", "prefill_seconds"
        self._output.transfers[recv.request_id] = {name: getattr(message, name) for name in names}

    def _fail(self, recv: Recv, reason: str) -> None:
        if recv.state is RecvState.ASKED:
            self._count_failure(recv, reason)
        recv.to(RecvState.FAILED, reason)
        self._output.failed_recving.add(recv.request_id)

    def _give_up(self, peer: Peer, recv: Recv, reason: str) -> None:
        """Nobody waits any more; the scheduler computes the prompt in other blocks, unless the request has ended. P is told,
        and told again: our Cancel may be lost, or the answer to it, and to say it twice does no harm."""
        if recv.state is RecvState.ASKED:
            self._count_failure(recv, reason)
            recv.to(RecvState.RECLAIMING, reason)
            self._output.given_up.add(recv.request_id)
        self._send(peer, Cancel(VERSION, recv.transfer_id))

    def _count_failure(self, recv: Recv, reason: str) -> None:
        self._stats.receive_failures += 1
        logger.warning(f"{recv.request_id}: no KV blocks from {recv.peer}: {reason}; it is computed here, or fails")

    def _watch(self, address: Address, peer: Peer) -> None:
        """Has the connection been lost, or could none be made?"""
        while self._peers.get(address) is peer and peer.monitor.poll(0):
            event = recv_monitor_message(peer.monitor)["event"]
            if event == zmq.EVENT_CONNECTED:
                peer.connected = True
            elif event == zmq.EVENT_CLOSED:
                self._drop(address, peer)
            else:
                # Lost: P may have died, or may live and write on. Over a new connection P, or whoever has come in its
                # place, answers our Cancel; or nobody is there. ZMQ makes one by itself, but not to a peer that has
                # broken its protocol: so we do.
                again = self._peers[address] = self._connect(address)
                again.recvs, again.connected = peer.recvs, True
                for recv in peer.recvs.values():
                    self._give_up(again, recv, "the connection is lost")
                _close(peer)

    def _drop(self, address: Address, peer: Peer) -> None:
        """Nobody is there. Whoever waits for it computes itself; the blocks are safe once GRACE is over."""
        for recv in peer.recvs.values():
            self._give_up(peer, recv, "nobody is there")
            recv.gone_at = time.monotonic()
            self._lost.append(recv)
        _close(peer)
        del self._peers[address]


def _close(peer: Peer) -> None:
    peer.socket.disable_monitor()
    peer.socket.close(linger=0)
    peer.monitor.close(linger=0)
