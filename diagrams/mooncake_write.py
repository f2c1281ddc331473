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
        "facts from the seeds; our side: connector/transport.py",
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
    p.cells(196, 142, [("64 KiB", "a"), ("64 KiB", "a"), ("64 KiB", "a"), ("8", "a")], 78, 32)
    p.text(526, 158, "source, `lkey`; target, `rkey`; peer NIC", kind="soft")
    p.box(
        16, 190, "`getBatchTransferStatus`: polls until all slices are done, or the batch has failed", 560, 34, "good"
    )
    p.group(0, 270, 950, 262, "worker pool of one NIC (there is one for each)")
    p.text(16, 322, "slice queue, 8 shards")
    shards = p.cells(16, 340, [(f"shard {i}", "plain") for i in range(8)], 70, 34, gap=4)
    p.group(10, 334, 604, 46)
    threads = [p.box(60 + i * 300, 420, f"`transferWorker` thread {i}", 230, 40, "b") for i in range(2)]
    for i, thread in enumerate(threads):
        p.arrow(
            Point(shards[4 * i + 1].r().x + 2, 380), Point(shards[4 * i + 1].r().x + 2, 420), "its half of the shards"
        )
        assert thread.rect.x0 < shards[4 * i + 1].r().x < thread.rect.x1
    p.text(
        16, 480, "each thread, in turns: `performPostSend` as many slices as the queue pair has room for,", kind="soft"
    )
    p.text(16, 499, "then `performPollCq`: what is done counts for its batch, what failed is tried again", kind="soft")
    qp = p.box(690, 320, "2 queue pairs (QP),\n512 work requests (WR) each", 236, 56, "warn")
    cq = p.box(690, 420, "1 completion queue (CQ)", 236, 40, "warn")
    p.arrow(threads[1].r(0.25), qp.l(), "post", "-|-", bend=650, on=0)
    p.arrow(cq.l(0.7), threads[1].r(0.7), "poll", side="below")
    p.arrow(qp.b(), cq.t(), "completions")
    p.box(690, 480, "NIC: one-sided RDMA write", 236, 38, "d")
    p.arrow(Point(900, 130), Point(900, 270), "slices", side="left")
    p.text(
        0,
        556,
        "A slice that fails counts against its NIC and goes to the next best one; a NIC that fails too often is left "
        "out for a while; the\n"
        "batch fails when no NIC is left. Over TCP (what we run by default) there are no NICs to choose from, and "
        "each piece of a batch\n"
        "costs some 40 µs: so `transport.py` merges neighbours, sends at most 512 pieces at once, and tries again "
        "after a pause.",
        kind="soft",
    )
    return p
