"""Inside Mooncake's write: from a batch of pieces to work requests on the cards, and back."""

from itertools import pairwise

from diagrams.drawing import Picture, Point


def draw() -> Picture:
    """The caller's thread above, the worker pool of each NIC below."""
    p = Picture(
        "Inside Mooncake's batch_transfer_sync_write (RDMA)",
        "A batch is cut into requests and slices of 64 KiB; slices go to shards of the slice queue of a NIC's worker "
        "pool, whose two threads post work requests and poll the completion queue; a failed slice is tried again on "
        "another NIC.",
        "Mooncake, August 2026; our side: connector/transport.py",
    )
    p.group(0, 0, 950, 236, "the thread that called: one of our 10 senders")
    names = [
        ("`openSegment`", "first time: ranges,\nrkeys, NICs of the peer"),
        ("`allocateBatchID`", "a batch counts what\nis done and failed"),
        ("`submitTransfer`", "a request for each\npiece of memory"),
        ("`submitTransferTask`", "cut into slices of\n64 KiB, each to a NIC"),
        ("`submitPostSend`", "onto that NIC's\nslice queue"),
    ]
    boxes = []
    for i, (name, what) in enumerate(names):
        x = 16 + i * 186
        boxes.append(p.box(x, 40, name, 174, 40, "accent"))
        p.text(x + 87, 98, what, "middle", "soft")
    for a, b in pairwise(boxes):
        p.arrow(a.r(), b.l())
    p.text(16, 158, "one request of 200 KiB", kind="ink")
    p.cells(196, 142, [("64 KiB", "a"), ("64 KiB", "a"), ("72 KiB", "a")], 88, 32)
    p.text(480, 158, "each: source, `lkey`; target, `rkey`; NIC of the peer", kind="soft")
    p.box(
        16, 190, "`getBatchTransferStatus`: polls until all slices are done, or the batch has failed", 560, 34, "good"
    )
    p.group(0, 270, 950, 308, "worker pool of one NIC (there is one for each)")
    p.text(16, 322, "slice queue, 8 shards")
    shards = p.cells(20, 340, [(f"shard {i}", "plain") for i in range(8)], 70, 34, gap=4)
    p.group(14, 334, 600, 46)
    p.group(50, 414, 540, 56)
    p.box(64, 422, "`transferWorker` 0: polls", 242, 40, "b")
    p.box(334, 422, "`transferWorker` 1: posts", 242, 40, "b")
    middle = shards[5].r().x + 2
    p.arrow(Point(middle, 380), Point(middle, 414), "all shards")
    p.text(
        16,
        494,
        "`performPostSend`: as many slices as the queue pairs have room for; `performPollCq`: up to\n"
        "64 completions at once, each counts for its request. (Older versions: both threads do both.)",
        kind="soft",
    )
    p.box(
        16, 530, "a failed slice: tried again over another NIC, up to 9 times, then its request fails", 574, 34, "bad"
    )
    qp = p.box(700, 302, "2 queue pairs (QP),\n256 work requests (WR) each:\n`ibv_post_send`", 232, 74, "warn")
    nic = p.box(700, 404, "NIC: one-sided RDMA write", 232, 40, "d")
    cq = p.box(700, 478, "1 completion queue (CQ):\n`ibv_poll_cq`", 232, 54, "warn")
    p.arrow(Point(590, 430), qp.l(), "post", "-|-", bend=650, on=0)
    p.arrow(qp.b(), nic.t())
    p.arrow(nic.b(), cq.t())
    p.arrow(cq.l(), Point(590, 456), "poll", "-|-", bend=650, on=2, side="below")
    p.arrow(Point(900, 130), Point(900, 270), "slices", side="left")
    p.text(
        0,
        604,
        "A way that fails 5 times in 5 s is left out for 30 s. A batch has failed when all its slices have ended and one "
        "has failed;\n"
        "what was written stays written. Over TCP (what we run by default) there are no NICs to choose from, and "
        "each piece of a batch\n"
        "costs some 40 µs: so `transport.py` merges neighbours, sends at most 512 pieces at once, and tries again "
        "after a pause.",
        kind="soft",
    )
    return p
