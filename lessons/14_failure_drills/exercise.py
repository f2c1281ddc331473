"""Exercise 14: D's side of a transfer, when it ends well and when it does not.

The class below is the engine's Consumer but for five methods, which you write. What you have: `self._peers` (address
-> Peer, whose `recvs` are the loads that P still has to answer for, by transfer id), `self._send(peer, message)`,
`self._receive(peer)`, `self._watch(address, peer)` (looks after the connection; calls your `_give_up`),
`self._count_failure(recv, reason)`, `recv.to(state, why)`, `self._stats`, and `self._output`, what is reported with
the next `poll`.

`nanopd grade 14 exercise.py` puts it between two real engines and breaks things. Rules P3-P6; see lessons/rules.md.
"""

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
        raise NotImplementedError("_on_message")

    def _fail(self, recv: Recv, reason: str) -> None:
        """The load has ended without its data, and nobody will write: state FAILED, reported as `failed_recving`.

        A failure is counted once a load: here if it was still ASKED (else `_give_up` has done it, or nobody wanted it).
        """
        raise NotImplementedError("_fail")

    def _give_up(self, peer: Peer, recv: Recv, reason: str) -> None:
        """D waits for a load no longer, but P may still write. If it is ASKED: counted as a failure, state RECLAIMING,
        reported as `given_up`. P is told with a Cancel, in any case: an earlier one may be lost, or its answer. The load
        stays among `peer.recvs` until P has answered."""
        raise NotImplementedError("_give_up")

    def cancel(self, request_id: str, address: Address, transfer_id: str, asked: bool) -> None:
        """The request has ended here, or needs nothing from P.

        If its load is ASKED: RECLAIMING, and P is told. That is no failure, and nothing is reported: the scheduler
        knows. If P was never asked (`asked` is False), P is told all the same, so that it need not hold the blocks:
        over `self._peer(address)`, which makes a connection. If the load has ended, is reclaiming already, or is
        another request's: nothing.
        """
        raise NotImplementedError("cancel")

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
        raise NotImplementedError("poll")
