"""What exercise 13 is graded by. `nanopd grade 13 FILE`, or `pytest` in this folder for exercise.py."""

import asyncio
import tempfile
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any
from unittest.mock import patch

from nanopd.connector.producer import Stage
from nanopd.connector.transport import TransferError
from nanopd_lessons import drive
from nanopd_lessons.grading import case


def told(chunk: Any) -> Any:
    """A chunk as one reads it."""
    return None if chunk is None else f"{chunk.room} chunk {chunk.number}"


def drain(queue: Any, most: int = 100) -> list[Any]:
    """Writes everything, one chunk after the other."""
    order = []
    while (chunk := queue.next()) is not None and len(order) < most:
        order.append(told(chunk))
        queue.done(chunk, True)
    return order


@case(points=2, hint="Write down for each of the five answers which call is the first after which it can be given.")
def test_one_room(student: ModuleType, random: Random) -> Any:
    """The life of one room: each poll from nothing to success"""
    queue, seen = student.SendQueue(random.choice(["fifo", "shortest"])), {}

    def look(when: str) -> None:
        seen[f"{len(seen)}: {when}"] = queue.poll("A").value

    look("nobody knows of it")
    count = random.randint(2, 4)
    queue.push("A", 4, last=False)
    look("a chunk is computed, D has said nothing")
    seen["handed out before D has said where to"] = told(queue.next())
    queue.open("A", 4 * count)
    look("opened")
    queue.open("A", 1)
    for i in range(count):
        seen[f"handed out, number {i}"] = list(chunk := queue.next() or student.Chunk("none", 0, 0, False))
        look(f"chunk {i} is being written")
        seen[f"another one besides number {i}"] = told(queue.next())
        queue.done(chunk, True)
        look(f"chunk {i} is written")
        if i < count - 1:
            queue.push("A", 4, last=i == count - 2)
    return seen


@case(points=2, hint="Who was pushed first? And which rooms may not have another chunk written just now?")
def test_fifo(student: ModuleType, random: Random) -> Any:
    """First come, first served, but one chunk of a room at a time, and none before its room is open"""
    queue, rooms = student.SendQueue("fifo"), "ABCD"
    for room in "ABC":
        queue.open(room, 20)
    for _ in range(12):
        queue.push(random.choice(rooms), 2, last=False)
    two = [queue.next(), queue.next()]
    seen: dict[str, Any] = {"two workers begin with": [told(chunk) for chunk in two]}
    for chunk in two[::-1]:
        if chunk:
            queue.done(chunk, True)
    seen["then, one by one"] = drain(queue)
    queue.open("D", 20)
    seen["when D has been opened"] = drain(queue)
    return seen


@case(
    points=2, hint="`shortest` goes by what `open` said, not by what is left or by the chunk. What do equal ones go by?"
)
def test_shortest(student: ModuleType, random: Random) -> Any:
    """The room with the fewest blocks in all first; of equals, the first pushed"""
    queue, seen = student.SendQueue("shortest"), {}
    sizes = {room: random.choice([6, 12, 12, 30]) for room in "ABCDEF"}
    for room, size in sizes.items():
        queue.open(room, size)
    for _ in range(20):
        queue.push(room := random.choice("ABCDEF"), random.randint(1, 3), last=False)
    seen[str(sizes)] = drain(queue)
    queue.push("A", 1, last=False)
    queue.open("short", 1)
    queue.push("short", 1, last=True)
    seen["a short one comes later"] = drain(queue)
    return seen


@case(points=3, hint="Which chunks of the room are still with you when one of them fails? And which will still come?")
def test_failures(student: ModuleType, random: Random) -> Any:
    """A chunk fails: its room has failed, nothing more of it goes out, and the others never notice"""
    seen = {}
    for order in ("fifo", "shortest"):
        queue = student.SendQueue(order)
        for room, size in (("A", 9), ("B", 12), ("C", 12)):
            queue.open(room, size)
        for i in range(3):
            for room in random.sample("ABC", 3):
                queue.push(room, 3, last=i == 2 and room == "A")
        victim, written = random.choice("ABC"), []
        while (chunk := queue.next()) is not None and len(written) < 30:
            ok = not (chunk.room == victim and chunk.number == 1)
            written.append(f"{told(chunk)}{'' if ok else ' fails'}")
            queue.done(chunk, ok)
            if not ok:
                queue.push(victim, 3, last=True)
        for room in "BC":
            queue.push(room, 3, last=True)
        seen[order] = {"written": written + drain(queue), "polls": {room: queue.poll(room).value for room in "ABC"}}
    return seen


@case(points=2, hint="SGLang issue 6857: an id came back, and its first poll was the old life's last one.")
def test_again(student: ModuleType, random: Random) -> Any:
    """A room that has succeeded or failed is opened again, under the same name"""
    seen = {}
    for ended in (True, False):
        queue = student.SendQueue("fifo")
        queue.open("A", 8)
        queue.push("A", 4, last=False)
        queue.push("A", 4, last=True)
        if not ended:
            queue.done(queue.next(), False)
        drain(queue)
        polls = [queue.poll("A").value]
        queue.push("A", 1, last=True)  # too late: it has ended
        queue.open("A", size := random.randint(2, 5))
        polls.append(queue.poll("A").value)
        late = told(queue.next())
        queue.push("A", size, last=True)
        chunk = queue.next()
        polls.append(queue.poll("A").value)
        if chunk:
            queue.done(chunk, True)
        polls.append(queue.poll("A").value)
        seen["after a success" if ended else "after a failure"] = [polls, late, list(chunk or [])]
    return seen


@case(
    points=3, hint="Three workers take chunks as long as there are some. Is one of your rooms stuck, or written twice?"
)
def test_bytes(student: ModuleType, random: Random) -> Any:
    """Ten rooms, three workers, chunks that arrive over time, some fail: what is in D's memory at the end"""
    seen = {}
    for order in ("fifo", "shortest"):
        queue, num_blocks = student.SendQueue(order), 100
        source, target = random.randbytes(16 * num_blocks), bytearray(16 * num_blocks)
        mine, theirs = random.sample(range(num_blocks), num_blocks), random.sample(range(num_blocks), num_blocks)
        places = {f"r{i}": [*zip(mine[10 * i : 10 * i + 10], theirs[10 * i : 10 * i + 10])] for i in range(10)}
        sizes = {room: random.randint(1, 10) for room in places}
        left, sent = dict(sizes), dict.fromkeys(places, 0)
        closed, writing, log = [*places], [], []
        for _ in range(200):
            if closed and random.random() < 0.2:
                queue.open(room := closed.pop(random.randrange(len(closed))), sizes[room])
            coming = [room for room in left if left[room]]
            if coming and random.random() < 0.5:
                room = random.choice(coming)
                left[room] -= (count := random.randint(1, min(3, left[room])))
                queue.push(room, count, last=not left[room])
            if len(writing) < 3 and (chunk := queue.next()) is not None:
                writing.append(chunk)
                log.append(told(chunk))
            if writing and random.random() < 0.5:
                chunk = writing.pop(random.randrange(len(writing)))
                ok = random.random() > 0.1
                for a, b in places[chunk.room][sent[chunk.room] :][: chunk.num_blocks] if ok else ():
                    target[16 * b : 16 * b + 16] = source[16 * a : 16 * a + 16]
                    sent[chunk.room] += 1
                queue.done(chunk, ok)
        right = {
            room: sum(target[16 * b : 16 * b + 16] == source[16 * a : 16 * a + 16] for a, b in places[room][:size])
            for room, size in sizes.items()
        }
        polls = {room: queue.poll(room).value for room in places}
        seen[order] = {"handed out": log, "blocks that are right": right, "polls": polls}
    return seen


class Jobs:
    """Stands where the producer has its queue of jobs, and asks the student's. For one sender thread."""

    def __init__(self, student: ModuleType, order: str) -> None:
        self.queue, self.jobs, self.order = student.SendQueue(order), {}, []
        self.current: Any = None
        self.more = asyncio.Event()

    def put_nowait(self, job: Any) -> None:
        *_, send = job
        room = send.transfer_id
        start, size = max(send.num_sent, send.pull.first_block), len(send.plan.block_ids)
        self.jobs[room] = job
        self.queue.open(room, len(send.pull.block_ids))
        self.queue.push(room, size - start, last=send.plan.stage is Stage.COMPLETE)
        self.more.set()

    async def get(self) -> Any:
        if self.current:
            chunk, job = self.current
            self.current = None
            self.queue.done(chunk, job[-1].failure is None)
        while (chunk := self.queue.next()) is None:
            self.more.clear()
            await self.more.wait()
        self.current = chunk, self.jobs[chunk.room]
        self.order.append(chunk.room)
        return self.jobs[chunk.room]


def generate(student: ModuleType, random: Random, order: str) -> Any:
    """P and D, real engines, the student's queue in the real producer; the write to one request is refused."""
    student.SendQueue(order).open("A", 1)  # if it is not written yet, this says so
    made: list[Jobs] = []

    def make() -> Jobs:
        made.append(Jobs(student, order))
        return made[-1]

    sizes = random.sample([9, 14, 22, 30, 38, 46, 54], 5)
    prompts = {f"{size} tokens": [random.randrange(10, 290) for _ in range(size)] for size in sizes}
    refused = -(-random.choice(sizes[1:]) // 4)
    with (
        tempfile.TemporaryDirectory() as directory,
        drive.in_memory() as transport,
        patch("nanopd.connector.producer.NUM_SENDERS", 1),
        patch("nanopd.connector.producer.asyncio.PriorityQueue", make),
    ):
        copy = transport.write

        def write(self: Any, session: str, pieces: Any, cancelled: Any) -> None:
            if sum(piece.num_bytes for piece in pieces) == refused * 2048:
                raise TransferError("refused")
            copy(self, session, pieces, cancelled)

        model = drive.tiny_model(Path(directory))
        p, d = drive.Node(model, "prefill"), drive.Node(model, "decode")
        transport.gate.clear()
        try:
            with patch.object(transport, "write", write):
                for i, (room, prompt) in enumerate(prompts.items()):
                    p.prefill(room, prompt)
                    drive.run_nodes(p, until=lambda room=room: room in p.answers)
                    p.step()
                    d.decode(room, prompt, p)
                    d.step()
                    drive.run_nodes(p, until=lambda i=i: len(made[0].jobs) == i + 1 and len(made[0].order) > 0)
                transport.gate.set()
                drive.run_nodes(p, d)
            failed = d.core.connector.stats().receive_failures
        finally:
            transport.gate.set()
            p.core.close()
            d.core.close()
    polls = {room: made[0].queue.poll(room).value for room in prompts}
    return {"written in this order": made[0].order, "polls": polls, "failed": failed, "tokens of D": d.tokens}


@case(
    points=4,
    hint="The first transfer is being written while the others are queued. Does only the refused one fail?",
    seconds=60,
)
def test_real_producer(student: ModuleType, random: Random) -> Any:
    """Your queue in the real producer, between two real engines, fifo and shortest"""
    return {order: generate(student, random, order) for order in ("fifo", "shortest")}
