"""Exercise 13: the sender's queue.

Chunks of several rooms (a room is one request's transfer) are computed, wait, are written by one or several workers, and may
fail. You keep the books: what is written next, and how far each room is. You write no bytes yourself.
`nanopd grade 13 exercise.py` puts your queue into the real producer.
"""

import enum
from typing import NamedTuple


class Poll(enum.Enum):
    """How far a room is."""

    BOOTSTRAPPING = "bootstrapping"  # D has not said where its blocks go
    WAITING_FOR_INPUT = "waiting for input"  # it has; no chunk has been handed out yet
    TRANSFERRING = "transferring"  # a chunk has been handed out
    SUCCESS = "success"  # the last chunk is written
    FAILED = "failed"  # a chunk could not be written


class Chunk(NamedTuple):
    """Some computed blocks of one room."""

    room: str
    number: int  # 0, 1, … in each life of a room
    num_blocks: int
    last: bool  # nothing of this room comes after it


class SendQueue:
    """Chunks that wait to be written.

    Args:
        order: "fifo": the chunk that was pushed first. "shortest": a chunk of the room with the fewest blocks in all; of
            rooms with equally many, the chunk that was pushed first.
    """

    def __init__(self, order: str) -> None:
        raise NotImplementedError("SendQueue")

    def open(self, room: str, num_blocks: int) -> None:
        """D has said where the blocks of this room go: `num_blocks` in all.

        A room that has ended, in whatever way, begins a new life: nothing of the old one counts. One that is open stays as
        it is.
        """
        raise NotImplementedError("open")

    def push(self, room: str, num_blocks: int, last: bool) -> None:
        """The next chunk of this room is computed.

        It may come before the room is opened; then it waits for that. If the room has ended, the chunk is dropped.
        """
        raise NotImplementedError("push")

    def next(self) -> Chunk | None:
        """Hands out a chunk to be written now; None: there is none.

        At most one chunk of a room is being written at any time, and they go out in the order in which they were pushed.
        Chunks of different rooms may be written at the same time.
        """
        raise NotImplementedError("next")

    def done(self, chunk: Chunk, ok: bool) -> None:
        """A chunk that was handed out is written, or could not be. If not, its room has failed, and no other."""
        raise NotImplementedError("done")

    def poll(self, room: str) -> Poll:
        """How far this room is."""
        raise NotImplementedError("poll")
