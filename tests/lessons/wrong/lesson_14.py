"""Wrong sides of a transfer."""

WRONG = {
    "reports a load that was given up as failed: its blocks are free at once": [
        (
            "        self._output.given_up.add(recv.request_id)\n",
            "        self._output.failed_recving.add(recv.request_id)\n",
        )
    ],
    "does not tell P when it gives up": [("        self._send(peer, Cancel(VERSION, recv.transfer_id))\n", "")],
    "says Cancel only once": [
        (
            "        self._send(peer, Cancel(VERSION, recv.transfer_id))\n",
            "            self._send(peer, Cancel(VERSION, recv.transfer_id))\n",
        )
    ],
    "lets P hold what nobody needs": [
        ("        elif not asked:\n            self._send(self._peer(address), Cancel(VERSION, transfer_id))\n", "")
    ],
    "fails at once when P is gone, without the grace": [("if now > (r.gone_at or 0) + GRACE]", "]")],
    "never gives up": [("if now > recv.deadline]", "if False]")],
    "counts failures twice": [
        (
            "        if recv.state is RecvState.ASKED:\n            self._count_failure(recv, reason)\n        recv.to(RecvState.FAILED, reason)",
            "        self._count_failure(recv, reason)\n        recv.to(RecvState.FAILED, reason)",
        )
    ],
    "keeps loads that have ended": [
        ("peer.recvs.pop(message.transfer_id, None)", "peer.recvs.get(message.transfer_id)")
    ],
    "counts a client that leaves as a failure": [
        (
            '            recv.to(RecvState.RECLAIMING, "not wanted any more")',
            '            self._count_failure(recv, "left")\n            recv.to(RecvState.RECLAIMING, "not wanted any more")',
        )
    ],
    "forgets the bytes": [("        self._stats.received_bytes += message.num_bytes\n", "")],
}
