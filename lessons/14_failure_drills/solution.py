"""The solution of exercise 14."""

import time

from nanopd.connector.consumer import GRACE, Address, Consumer, Peer, Recv
from nanopd.connector.protocol import VERSION, Cancel, Done, Failed, RecvState
from nanopd.core.output import KVConnectorOutput


class DecodeSide(Consumer):
    def _on_message(self, peer: Peer, message: Done | Failed) -> None:
        """P has answered for `message.transfer_id`, and will not write any more.

        The load is no longer among `peer.recvs`. Failed: see `_fail`. Done: state DONE; one more in `received`, its
        bytes in `received_bytes` of the stats; reported as `finished_recving`, and in `transfers` by request id a
        dict with the message's num_bytes, num_pieces, seconds and prefill_seconds. An answer about a load that is not
        there (any more) is ignored.
        """
        recv = peer.recvs.pop(message.transfer_id, None)
        if recv is None:
            return
        if isinstance(message, Failed):
            self._fail(recv, message.reason)
            return
        recv.to(RecvState.DONE, f"{message.num_bytes} bytes")
        self._stats.received += 1
        self._stats.received_bytes += message.num_bytes
        self._output.finished_recving.add(recv.request_id)
        names = "num_bytes", "num_pieces", "seconds", "prefill_seconds"
        self._output.transfers[recv.request_id] = {name: getattr(message, name) for name in names}

    def _fail(self, recv: Recv, reason: str) -> None:
        """The load has ended without its data, and nobody will write: state FAILED, reported as `failed_recving`.

        A failure is counted once a load: here if it was still ASKED (else `_give_up` has done it, or nobody wanted it).
        """
        if recv.state is RecvState.ASKED:
            self._count_failure(recv, reason)
        recv.to(RecvState.FAILED, reason)
        self._output.failed_recving.add(recv.request_id)

    def _give_up(self, peer: Peer, recv: Recv, reason: str) -> None:
        """D waits for a load no longer, but P may still write. If it is ASKED: counted as a failure, state RECLAIMING,
        reported as `given_up`. P is told with a Cancel, in any case: an earlier one may be lost, or its answer. The load
        stays among `peer.recvs` until P has answered."""
        if recv.state is RecvState.ASKED:
            self._count_failure(recv, reason)
            recv.to(RecvState.RECLAIMING, reason)
            self._output.given_up.add(recv.request_id)
        self._send(peer, Cancel(VERSION, recv.transfer_id))

    def cancel(self, request_id: str, address: Address, transfer_id: str, asked: bool) -> None:
        """The request has ended here, or needs nothing from P.

        If its load is ASKED: RECLAIMING, and P is told. That is no failure, and nothing is reported: the scheduler
        knows. If P was never asked (`asked` is False), P is told all the same, so that it need not hold the blocks:
        over `self._peer(address)`, which makes a connection. If the load has ended, is reclaiming already, or is
        another request's: nothing.
        """
        recv = self._peers[address].recvs.get(transfer_id) if address in self._peers else None
        if recv is not None and recv.request_id == request_id and recv.state is RecvState.ASKED:
            recv.to(RecvState.RECLAIMING, "not wanted any more")
            self._send(self._peers[address], Cancel(VERSION, transfer_id))
        elif not asked:
            self._send(self._peer(address), Cancel(VERSION, transfer_id))

    def poll(self) -> KVConnectorOutput:
        """What has happened since the last call. For each peer, in this order: take in all messages (`_receive` gives
        None when there are no more); look at deadlines; `_watch`. Iterate over a copy: `_watch` may change
        `self._peers`.

        A load whose deadline (time.monotonic()) is over gets a new one, `self._load_timeout` from now, and is given up
        (again, if it is RECLAIMING). If a load was overdue, the peer is still the one at this address, and was never
        connected (`peer.connected`): `self._drop(address, peer)`.

        At last: loads in `self._lost`, whose P is gone since `recv.gone_at`, fail when GRACE seconds are over.
        Returns `self._output` and starts a new one.
        """
        now = time.monotonic()
        for address, peer in list(self._peers.items()):
            while (message := self._receive(peer)) is not None:
                self._on_message(peer, message)
            overdue = [recv for recv in peer.recvs.values() if now > recv.deadline]
            for recv in overdue:
                recv.deadline = now + self._load_timeout
                self._give_up(peer, recv, "too late")
            self._watch(address, peer)
            if overdue and not peer.connected and self._peers.get(address) is peer:
                self._drop(address, peer)
        for recv in [r for r in self._lost if now > (r.gone_at or 0) + GRACE]:
            self._lost.remove(recv)
            self._fail(recv, "P is gone")
        output, self._output = self._output, KVConnectorOutput()
        return output
