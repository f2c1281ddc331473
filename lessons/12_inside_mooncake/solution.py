"""The solution of exercise 12, and the engine that the lesson's script drives."""

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
        slices, offset = [], 0
        while offset < request.num_bytes:
            left = request.num_bytes - offset
            size = left if left <= SLICE_SIZE + FRAGMENT_LIMIT else SLICE_SIZE
            slices.append(Slice(request, request.source + offset, request.target + offset, size))
            offset += size
        request.num_slices = len(slices)
        return slices

    def submit(self, requests: Sequence[Request]) -> None:
        """Cuts requests and puts their slices into shards. The n-th slice of the batch, from 0, goes to card
        n % num_nics, and a slice for card i into shard i % NUM_SHARDS."""
        slices = [one for request in requests for one in self.cut(request)]
        for n, one in enumerate(slices):
            one.nic = n % self.segment.num_nics
            self.shards[one.nic % NUM_SHARDS].append(one)

    def post(self) -> None:
        """One turn of the posting thread: from each shard, as many slices as fit are posted; the rest stays, in order.

        The slices of a shard that go to one endpoint are shared out over its queue pairs: with k queue pairs still to come,
        the next one gets the first ceil(left / k) of those that are left, but never more than MAX_WR in flight. What
        does not fit one stays in the shard. `depth` of the queue pair and `queue_pair` of the slice are kept.
        """
        for shard in self.shards:
            waiting, rest = list(shard), []
            shard.clear()
            for endpoint in self.endpoints:
                mine = [one for one in waiting if one.nic == endpoint.nic]
                for i, queue_pair in enumerate(endpoint.queue_pairs):
                    share = -(-len(mine) // (len(endpoint.queue_pairs) - i))
                    fits = min(share, MAX_WR - queue_pair.depth)
                    for one in mine[:fits]:
                        one.queue_pair = queue_pair
                    queue_pair.post_send(mine[:fits])
                    queue_pair.depth += fits
                    rest += mine[fits:share]
                    mine = mine[share:]
            left = set(map(id, rest))
            shard.extend(one for one in waiting if id(one) in left)

    def poll(self) -> None:
        """One turn of the polling thread: takes completions from each endpoint once, and lowers the depths.

        A slice that was written counts as succeeded in its request. One that was not is tried again on the next card
        (nic + 1, around the end) and goes into that card's shard; after MAX_RETRIES tries again it counts as failed.
        """
        for endpoint in self.endpoints:
            for one, good in endpoint.poll():
                assert one.queue_pair is not None
                one.queue_pair.depth -= 1
                if good:
                    one.request.num_succeeded += 1
                elif one.num_retries >= MAX_RETRIES:
                    one.request.num_failed += 1
                else:
                    one.num_retries += 1
                    one.nic = (one.nic + 1) % self.segment.num_nics
                    self.shards[one.nic % NUM_SHARDS].append(one)

    def transfer_sync(self, requests: Sequence[Request], work: int = 64) -> int:
        """Writes a batch: turns of post, cards working (`endpoint.work(work)`), poll, until every request has ended.

        Returns 0 if all were COMPLETED, else -1.
        """
        self.submit(requests)
        while any(request.status == "WAITING" for request in requests):
            self.post()
            for endpoint in self.endpoints:
                endpoint.work(work)
            self.poll()
        return 0 if all(request.status == "COMPLETED" for request in requests) else -1
