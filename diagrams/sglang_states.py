"""How SGLang does P/D: the poll states of sender and receiver, and the queues on each side."""

from diagrams.drawing import Picture, Route, states


def draw() -> Picture:
    """SGLang's own words; for each state its counterpart here."""
    p = Picture(
        "P/D in SGLang, next to ours",
        "SGLang binds a KVSender and a KVReceiver to each request; both are polled in the event loop: Bootstrapping, "
        "WaitingForInput, Transferring, Success or Failed. Below, the queues on each side.",
        "SGLang's KVPoll; ours: connector/protocol.py",
    )
    table = {
        "Bootstrapping": ["WaitingForInput", "Failed"],
        "WaitingForInput": ["Transferring", "Failed"],
        "Transferring": ["Success", "Failed"],
        "Success": [],
        "Failed": [],
    }
    states(
        p,
        table,
        {
            "Bootstrapping": (90, 20, "plain"),
            "WaitingForInput": (360, 20, "plain"),
            "Transferring": (640, 20, "warn"),
            "Success": (860, 20, "good"),
            "Failed": (640, 110, "bad"),
        },
        {
            ("Bootstrapping", "WaitingForInput"): Route("r", "l", "has met"),
            ("WaitingForInput", "Transferring"): Route("r", "l", "first chunk"),
            ("Transferring", "Success"): Route("r", "l", "all, and aux"),
            ("Bootstrapping", "Failed"): Route("b", "l.7", "", {"way": "|-"}),
            ("WaitingForInput", "Failed"): Route("b", "l.3", "timeout, peer gone", {"way": "|-", "on": 1}),
            ("Transferring", "Failed"): Route("b", "t", "write failed"),
        },
        name=lambda state: state,
    )
    p.text(90, 158, "both sides poll: `KVSender` on prefill, `KVReceiver` on decode", kind="soft")
    p.group(0, 190, 460, 196, "prefill node")
    boxes = [
        p.box(16 + i * 148, 232, f"{name}\nqueue", 132, 56, "a")
        for i, name in enumerate(("bootstrap", "waiting", "inflight"))
    ]
    p.arrow(boxes[0].r(), boxes[1].l())
    p.arrow(boxes[1].r(), boxes[2].l())
    p.text(
        16,
        312,
        "`send_kv_chunk` after each chunk puts it into the\n"
        "transfer queue; `transfer_worker` threads write each\n"
        "layer with `transfer_sync`, at last the aux data.",
        kind="soft",
    )
    p.group(490, 190, 460, 196, "decode node")
    boxes = [
        p.box(506 + i * 148, 232, f"{name}\nqueue", 132, 56, "b")
        for i, name in enumerate(("prealloc", "transfer", "waiting"))
    ]
    p.arrow(boxes[0].r(), boxes[1].l())
    p.arrow(boxes[1].r(), boxes[2].l())
    p.text(
        506,
        312,
        "KV memory is reserved before P is told its address,\n"
        "the receiver's init tells it; the queue is polled until\n"
        "`Success`, then the request joins the batch.",
        kind="soft",
    )
    p.table(
        0,
        406,
        [
            ["SGLang", "here, on P (SendState)", "here, on D"],
            ["Bootstrapping", "ASKED, or COMPUTING without a Pull", "`WAITING`"],
            ["WaitingForInput", "COMPUTING with a Pull, or HELD without", "`WAITING_FOR_REMOTE_KVS`, RecvState ASKED"],
            ["Transferring", "SENDING", "`WAITING_FOR_REMOTE_KVS`, RecvState ASKED"],
            ["Success / Failed", "DONE / FAILED", "promoted (S5) / recomputed (S10)"],
        ],
        (200, 340, 410),
    )
    return p
