"""The states of a request, from the table that the engine itself goes by."""

from diagrams.drawing import Picture, Route, states
from nanopd.request import _CUT_SHORT, TRANSITIONS
from nanopd.request import RequestStatus as S


def draw() -> Picture:
    """Six states before the end, two good ends, two that cut it short."""
    p = Picture(
        "The states of a request",
        "Every legal transition between the states of a request, from nanopd.request.TRANSITIONS; anything else "
        "raises.",
        "nanopd/request.py: TRANSITIONS",
    )
    places = {
        S.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR: (210, 20, "warn"),
        S.WAITING_FOR_STREAMING_REQ: (585, 20, "warn"),
        S.WAITING: (210, 154, "plain"),
        S.RUNNING: (585, 154, "a"),
        S.WAITING_FOR_REMOTE_KVS: (210, 304, "warn"),
        S.PREEMPTED: (585, 304, "plain"),
        S.FINISHED_STOPPED: (835, 98, "good"),
        S.FINISHED_LENGTH: (835, 147, "good"),
        S.FINISHED_ABORTED: (290, 436, "bad"),
        S.FINISHED_ERROR: (530, 436, "bad"),
    }
    cut = p.group(0, 386, 950, 82, "cut short: client gone, or an error, at any time")
    cut_short = "cut short"
    routes: dict[tuple[S, S | str], Route] = {
        (S.WAITING, S.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR): Route(
            "t.3", "b.446", "has a grammar\n(S12)", {"side": "left"}
        ),
        (S.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR, S.WAITING): Route("b.554", "t.7", "it is compiled\n(S12)"),
        (S.WAITING, S.RUNNING): Route("r.75", "l.75", "scheduled (S4)", {"side": "below"}),
        (S.WAITING, S.WAITING_FOR_REMOTE_KVS): Route("b.3", "t.39", "remote hit:\nwaits (S5)", {"side": "left"}),
        (S.WAITING_FOR_REMOTE_KVS, S.WAITING): Route("t.61", "b.7", "data is there (S5),\nor given up (S10)"),
        (S.RUNNING, S.PREEMPTED): Route("b.3", "t.34", "no block left (S3)", {"side": "left"}),
        (S.PREEMPTED, S.RUNNING): Route("t.66", "b.7", "comes back (S4)"),
        (S.PREEMPTED, S.WAITING_FOR_REMOTE_KVS): Route("l", "r", "loads again (S5)"),
        (S.RUNNING, S.WAITING_FOR_STREAMING_REQ): Route("t", "b", "answer of\na session\nends (S13)", {"side": "left"}),
        (S.WAITING_FOR_STREAMING_REQ, S.WAITING): Route("b.04", "r.25", "further input (S13)", {"way": "|-", "on": 1}),
        (S.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR, S.WAITING_FOR_STREAMING_REQ): Route("r", "l", "fails"),
        (S.RUNNING, S.FINISHED_STOPPED): Route("r.3", "l", "end token", {"way": "-|-", "bend": 688, "on": 2}),
        (S.RUNNING, S.FINISHED_LENGTH): Route("r.3", "l", "length", {"at": 0.72}),
    }
    ways = {
        S.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR: ("l", f"t{12 / 950}", {"way": "-|"}),
        S.WAITING_FOR_STREAMING_REQ: ("r", f"t{938 / 950}", {"way": "-|"}),
        S.WAITING: ("l", f"t{52 / 950}", {"way": "-|"}),
        S.RUNNING: ("r.8", f"t{750 / 950}", {"way": "-|"}),
        S.WAITING_FOR_REMOTE_KVS: ("b", f"t{210 / 950}", {}),
        S.PREEMPTED: ("b", f"t{585 / 950}", {}),
    }
    for state, (start, end, options) in ways.items():
        routes[state, cut_short] = Route(start, end, "", options)
    states(p, TRANSITIONS, places, routes, {cut_short: (cut, _CUT_SHORT)})
    return p
