"""The solution of exercise 13."""

import enum
from collections import deque
from dataclasses import dataclass, field
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


@dataclass
class Room:
    """One life of a room."""

    size: int | None = None  # blocks in all; None: it is not open yet
    chunks: deque[tuple[int, Chunk]] = field(default_factory=deque)  # that wait, each with its place in the queue
    num_pushed: int = 0
    begun: bool = False
    writing: bool = False
    end: Poll | None = None


class SendQueue:
    """Chunks that wait to be written.

    Args:
        order: "fifo": the chunk that was pushed first. "shortest": a chunk of the room with the fewest blocks in all; of
            rooms with equally many, the chunk that was pushed first.
    """

    def __init__(self, order: str) -> None:
        self.order, self.count = order, 0
        self.rooms: dict[str, Room] = {}

    def open(self, room: str, num_blocks: int) -> None:
        """D has said where the blocks of this room go: `num_blocks` in all."""
        if room not in self.rooms or self.rooms[room].end:
            self.rooms[room] = Room()
        if self.rooms[room].size is None:
            self.rooms[room].size = num_blocks

    def push(self, room: str, num_blocks: int, last: bool) -> None:
        """The next chunk of this room is computed."""
        of = self.rooms.setdefault(room, Room())
        if of.end is None:
            of.chunks.append((self.count, Chunk(room, of.num_pushed, num_blocks, last)))
            of.num_pushed += 1
            self.count += 1

    def next(self) -> Chunk | None:
        """Hands out a chunk to be written now; None: there is none."""
        ready = [of for of in self.rooms.values() if of.chunks and of.size is not None and not of.writing]
        if not ready:
            return None
        of = min(ready, key=lambda of: (of.size if self.order == "shortest" else 0, of.chunks[0][0]))
        of.begun = of.writing = True
        return of.chunks.popleft()[1]

    def done(self, chunk: Chunk, ok: bool) -> None:
        """A chunk that was handed out is written, or could not be."""
        of = self.rooms[chunk.room]
        of.writing = False
        if not ok:
            of.end = Poll.FAILED
            of.chunks.clear()
        elif chunk.last:
            of.end = Poll.SUCCESS

    def poll(self, room: str) -> Poll:
        """How far this room is."""
        of = self.rooms.get(room, Room())
        if of.end or of.size is None:
            return of.end or Poll.BOOTSTRAPPING
        return Poll.TRANSFERRING if of.begun else Poll.WAITING_FOR_INPUT
