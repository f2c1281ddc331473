"""Exercise 12: the worker pool of a transfer engine.

Write the five parts below. The hardware is in fabric.py: read Request, Slice, QueuePair and Endpoint first.
`nanopd grade 12 exercise.py` lets your engine move real KV memory, breaks cards under it, and compares with real Mooncake.
"""

from collections import deque
from collections.abc import Sequence

from fabric import FRAGMENT_LIMIT, MAX_RETRIES, MAX_WR, NUM_SHARDS, SLICE_SIZE, Endpoint, Request, Segment, Slice


class Engine:
    """Writes batches into one peer's memory."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.endpoints = [Endpoint(segment, nic) for nic in range(segment.num_nics)]
        self.shards: list[deque[Slice]] = [deque() for _ in range(NUM_SHARDS)]

    def cut(self, request: Request) -> list[Slice]:
        """The slices of a request, in order; counts them in `request.num_slices`.

        A slice has SLICE_SIZE bytes. The last one may have up to FRAGMENT_LIMIT more: a small rest gets no slice of its own.
        """
        raise NotImplementedError("cut")

    def submit(self, requests: Sequence[Request]) -> None:
        """Cuts requests and puts their slices into shards. The n-th slice of the batch, from 0, goes to card
        n % num_nics, and a slice for card i into shard i % NUM_SHARDS."""
        raise NotImplementedError("submit")

    def post(self) -> None:
        """One turn of the posting thread: from each shard, as many slices as fit are posted; the rest stays, in order.

        The slices of a shard that go to one endpoint are shared out over its queue pairs: with k queue pairs still to come,
        the next one gets the first ceil(left / k) of those that are left, but never more than MAX_WR in flight. What
        does not fit one stays in the shard. `depth` of the queue pair and `queue_pair` of the slice are kept.
        """
        raise NotImplementedError("post")

    def poll(self) -> None:
        """One turn of the polling thread: takes completions from each endpoint once, and lowers the depths.

        A slice that was written counts as succeeded in its request. One that was not is tried again on the next card
        (nic + 1, around the end) and goes into that card's shard; after MAX_RETRIES tries again it counts as failed.
        """
        raise NotImplementedError("poll")

    def transfer_sync(self, requests: Sequence[Request], work: int = 64) -> int:
        """Writes a batch: turns of post, cards working (`endpoint.work(work)`), poll, until every request has ended.

        Returns 0 if all were COMPLETED, else -1.
        """
        raise NotImplementedError("transfer_sync")
