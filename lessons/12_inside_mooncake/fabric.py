"""The hardware of lesson 12: network cards that write into a peer's memory, and the words for what is sent.

There is no time here, only turns. But the bytes are real: a work request copies memory, if the address lies in a
registered region of the peer and the card is up. Sizes are Mooncake's defaults (its config.h and worker_pool.h,
August 2026).
"""

import ctypes
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

SLICE_SIZE, FRAGMENT_LIMIT = 65_536, 16_384  # bytes
NUM_SHARDS = 8
QPS_PER_ENDPOINT, MAX_WR = 2, 256  # work requests in flight on one queue pair
POLL_COUNT = 64  # completions taken at once
MAX_RETRIES = 9


@dataclass(eq=False)
class Request:
    """One piece of a batch: `num_bytes` from an address here to an address there."""

    source: int
    target: int
    num_bytes: int
    num_slices: int = 0
    num_succeeded: int = 0
    num_failed: int = 0

    @property
    def status(self) -> str:
        """WAITING until every slice has ended; then COMPLETED, or FAILED if one has failed."""
        if self.num_succeeded + self.num_failed < self.num_slices:
            return "WAITING"
        return "FAILED" if self.num_failed else "COMPLETED"


@dataclass(eq=False)
class Slice:
    """A part of a request that is small enough for one work request."""

    request: Request
    source: int
    target: int
    num_bytes: int
    num_retries: int = 0
    nic: int = 0  # of the peer's cards, the one it is sent to
    queue_pair: "QueuePair | None" = None


@dataclass
class Segment:
    """What a peer has told of itself: its registered memory, and its cards. Fetched once, then cached."""

    regions: list[tuple[int, int]]  # address, bytes
    num_nics: int

    def holds(self, address: int, num_bytes: int) -> bool:
        return any(base <= address and address + num_bytes <= base + size for base, size in self.regions)


@dataclass(eq=False)
class QueuePair:
    """Work requests go in; the card takes them in order. `depth`: how many are in flight, counted by the software."""

    posted: deque[Slice] = field(default_factory=deque)
    depth: int = 0

    def post_send(self, slices: Sequence[Slice]) -> None:
        """Hands slices to the card. Full is full: the software must have counted."""
        if len(self.posted) + len(slices) > MAX_WR:
            raise OverflowError(f"the queue pair holds {MAX_WR} work requests")
        self.posted.extend(slices)


class Endpoint:
    """The way from our card to one card of the peer: two queue pairs that share a completion queue."""

    def __init__(self, segment: Segment, nic: int) -> None:
        self.nic, self.segment = nic, segment
        self.queue_pairs = [QueuePair() for _ in range(QPS_PER_ENDPOINT)]
        self.completions: deque[tuple[Slice, bool]] = deque()
        self.up = True
        self.num_written = 0  # bytes

    def work(self, most: int) -> None:
        """The card does up to `most` work requests of each queue pair: it copies bytes, or reports an error."""
        for queue_pair in self.queue_pairs:
            for _ in range(min(most, len(queue_pair.posted))):
                one = queue_pair.posted.popleft()
                good = self.up and self.segment.holds(one.target, one.num_bytes)
                if good:
                    ctypes.memmove(one.target, one.source, one.num_bytes)
                    self.num_written += one.num_bytes
                self.completions.append((one, good))

    def poll(self, most: int = POLL_COUNT) -> list[tuple[Slice, bool]]:
        """Up to `most` completions: a slice, and whether it was written."""
        return [self.completions.popleft() for _ in range(min(most, len(self.completions)))]
