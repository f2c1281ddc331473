"""The states of a transfer on both sides, from the tables of the protocol."""

from diagrams.drawing import Picture, Point, Route, states
from nanopd.connector.protocol import RECV_TRANSITIONS, SEND_TRANSITIONS
from nanopd.connector.protocol import RecvState as R
from nanopd.connector.protocol import SendState as S


def draw() -> Picture:
    """P above, D below."""
    p = Picture(
        "The states of a transfer",
        "P's and D's side of one KV transfer, from SEND_TRANSITIONS and RECV_TRANSITIONS of nanopd.connector.protocol.",
        "nanopd/connector/protocol.py: SEND_TRANSITIONS, RECV_TRANSITIONS",
    )
    p.group(0, 0, 944, 286, "P sends: SendState")
    sends = states(
        p,
        SEND_TRANSITIONS,
        {
            S.ASKED: (90, 140, "plain"),
            S.COMPUTING: (310, 140, "a"),
            S.HELD: (560, 140, "plain"),
            S.SENDING: (764, 140, "warn"),
            S.DONE: (892, 140, "good"),
            S.FAILED: (560, 236, "bad"),
        },
        {
            (S.ASKED, S.COMPUTING): Route("r", "l", "prefill starts"),
            (S.COMPUTING, S.HELD): Route("r", "l", "computed,\nnobody has asked"),
            (S.COMPUTING, S.SENDING): Route("t.75", "t", "blocks there, D has asked", {"way": "|-|", "bend": 88}),
            (S.HELD, S.SENDING): Route("r", "l", "Pull"),
            (S.SENDING, S.DONE): Route("r", "l", "Done"),
            (S.ASKED, S.FAILED): Route("b", "l.7", "", {"way": "|-"}),
            (S.COMPUTING, S.FAILED): Route("b", "l.3", "Cancel, timeout,\nrefusal (P2, P3)", {"way": "|-", "on": 1}),
            (S.HELD, S.FAILED): Route("b", "t", "timeout, make_room (P3)", {}),
            (S.SENDING, S.FAILED): Route("b", "r", "write failed", {"way": "|-", "on": 1, "side": "below"}),
        },
    )
    for state, f, words in ((S.ASKED, 0.5, "Pull comes first"), (S.COMPUTING, 0.25, "prefill comes first")):
        end = sends[state].t(f)
        p.arrow(Point(end.x, 74), end)
        p.text(end.x, 62, words, "middle", "soft")
    p.group(0, 306, 944, 208, "D receives: RecvState")
    receives = states(
        p,
        RECV_TRANSITIONS,
        {
            R.ASKED: (90, 410, "warn"),
            R.RECLAIMING: (480, 410, "plain"),
            R.DONE: (880, 410, "good"),
            R.FAILED: (880, 476, "bad"),
        },
        {
            (R.ASKED, R.RECLAIMING): Route("r", "l", "timeout, abort, connection lost (P4)"),
            (R.ASKED, R.DONE): Route("t.75", "t", "Done: all is written", {"way": "|-|", "bend": 366}),
            (R.ASKED, R.FAILED): Route("b", "l.75", "Failed: recompute (S10)", {"way": "|-", "on": 1, "at": 0.24}),
            (R.RECLAIMING, R.DONE): Route("r", "l", "Done, too late"),
            (R.RECLAIMING, R.FAILED): Route("b", "l.25", "P writes no more", {"way": "|-", "on": 1, "at": 0.65}),
        },
    )
    end = receives[R.ASKED].t(0.25)
    p.arrow(Point(end.x, 380), end)
    p.text(end.x, 356, "Pull is sent", "middle", "soft")
    return p
