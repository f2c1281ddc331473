# %% [markdown]
# # 13 SGLang's way of P/D
# A small model of SGLang's two event loops: explicit states, real bytes, and ticks instead of seconds, so that everything
# can be counted. Then the same questions to nanopd's real producer.

# %%
import enum
import random
import tempfile
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from pathlib import Path
from unittest.mock import patch

from nanopd.connector.consumer import Consumer
from nanopd.connector.producer import Producer, Stage
from nanopd.connector.transport import MooncakeTransport, TransferError
from nanopd_lessons import drive, show

# %% [markdown]
# ## Five states
# What each side answers when it is polled about a request. The numbers matter: when several ranks serve one request, the
# lowest counts.


# %%
class Poll(enum.IntEnum):
    FAILED = 0
    BOOTSTRAPPING = 1  # D has not said where the blocks go
    WAITING_FOR_INPUT = 2  # it has; nothing is sent yet
    TRANSFERRING = 3
    SUCCESS = 4


MAY_BECOME = {
    Poll.BOOTSTRAPPING: {Poll.WAITING_FOR_INPUT, Poll.FAILED},
    Poll.WAITING_FOR_INPUT: {Poll.TRANSFERRING, Poll.SUCCESS, Poll.FAILED},  # D hears of the end only
    Poll.TRANSFERRING: {Poll.SUCCESS, Poll.FAILED},
    Poll.SUCCESS: set(),
    Poll.FAILED: set(),
}
assert min(Poll.SUCCESS, Poll.TRANSFERRING, Poll.SUCCESS) is Poll.TRANSFERRING, "not before all ranks have it"
assert min(Poll.SUCCESS, Poll.FAILED) is Poll.FAILED, "one rank that fails is enough"


@dataclass
class Manager:
    """One on each side: the state of each room. A room is one request's transfer; the router makes up its number."""

    states: dict[str, Poll] = field(default_factory=dict)

    def poll(self, room: str) -> Poll:
        return self.states.get(room, Poll.BOOTSTRAPPING)

    def ended(self, room: str) -> bool:
        return not MAY_BECOME[self.poll(room)]

    def become(self, room: str, state: Poll) -> None:
        assert state in MAY_BECOME[self.poll(room)], f"{room}: {self.poll(room).name} -> {state.name}"
        self.states[room] = state


# %% [markdown]
# ## P's loop, and its transfer worker
# Each tick: take over what D is ready for, compute one chunk of the first request, send it or not, poll what is in flight.
# Beside the loop a worker copies `rate` blocks a tick, one chunk after the other.

# %%
BLOCK, CHUNK = 64, 4  # bytes of a block; blocks that are computed in a tick


@dataclass
class Job:
    """A chunk on its way."""

    room: str
    size: int  # blocks of the whole request
    pairs: list[tuple[int, int]]  # P's block, D's block
    last: bool


class Prefill:
    """bootstrap queue -> waiting queue -> inflight queue"""

    def __init__(self, push: str, rate: int, order: str) -> None:
        self.memory, self.free = bytearray(200 * BLOCK), [*range(200)]
        self.push, self.rate, self.order = push, rate, order
        self.manager, self.chance = Manager(), random.Random(0)
        self.bootstrap: list[tuple[str, int]] = []
        self.waiting: deque[tuple[str, int]] = deque()
        self.inflight: list[str] = []
        self.tables: dict[str, list[int]] = {}
        self.wanted: dict[str, tuple[list[int], Decode]] = {}  # where D wants the blocks
        self.jobs: list[Job] = []
        self.job: Job | None = None  # the one that is being copied
        self.copied: Counter[str] = Counter()  # chunks, by room
        self.early: Counter[str] = Counter()  # of those, before the last one was computed
        self.fail_after: dict[str, int] = {}  # to try it out: after so many chunks

    def metadata(self, room: str, blocks: list[int], decode: "Decode") -> None:
        """D's message."""
        self.wanted[room] = blocks, decode
        self.manager.become(room, Poll.WAITING_FOR_INPUT)

    def tick(self) -> None:
        ready = [entry for entry in self.bootstrap if self.manager.poll(entry[0]) is Poll.WAITING_FOR_INPUT]
        self.bootstrap = [entry for entry in self.bootstrap if entry not in ready]
        self.waiting += ready
        if self.waiting:
            room, size = self.waiting[0]
            table = self.tables.setdefault(room, [])
            done = len(table)
            for _ in range(min(CHUNK, size - done)):
                table.append(block := self.free.pop(0))
                self.memory[block * BLOCK : (block + 1) * BLOCK] = self.chance.randbytes(BLOCK)
            last = len(table) == size
            if self.push == "per_chunk" or last:
                self.send(room, size, done if self.push == "per_chunk" else 0, last)
            if last:
                self.waiting.popleft()
                self.inflight.append(room)
        for room in filter(self.manager.ended, [*self.inflight]):
            self.inflight.remove(room)
            self.free += self.tables.pop(room)

    def send(self, room: str, size: int, start: int, last: bool) -> None:
        """The sender. Nobody sends for a room that has failed."""
        if not self.manager.ended(room):
            pairs = [*zip(self.tables[room], self.wanted[room][0])][start:]
            self.jobs.append(Job(room, size, pairs, last))

    def work(self) -> None:
        """The transfer worker's tick. A chunk that is begun is finished first: the transfer is synchronous."""
        left = self.rate
        while left and (self.job or self.jobs):
            if self.job is None:
                first = self.jobs[0] if self.order == "fifo" else min(self.jobs, key=lambda job: job.size)
                self.jobs.remove(first)
                self.job = first
                if self.manager.poll(first.room) is Poll.WAITING_FOR_INPUT:
                    self.manager.become(first.room, Poll.TRANSFERRING)
            job, (_, decode) = self.job, self.wanted[self.job.room]
            for a, b in job.pairs[:left]:
                decode.memory[b * BLOCK : (b + 1) * BLOCK] = self.memory[a * BLOCK : (a + 1) * BLOCK]
            job.pairs, left = job.pairs[left:], left - len(job.pairs[:left])
            if not job.pairs:
                self.job = None
                self.finish(job, decode)

    def finish(self, job: Job, decode: "Decode") -> None:
        """A chunk is copied."""
        self.copied[job.room] += 1
        self.early[job.room] += any(room == job.room for room, _ in self.waiting)
        if self.fail_after.get(job.room) == self.copied[job.room]:
            self.conclude(job.room, Poll.FAILED)
            self.jobs = [other for other in self.jobs if other.room != job.room]
        elif job.last:  # the auxiliary data goes with the last chunk
            decode.aux[job.room] = {"room": job.room, "first token": sum(map(ord, job.room))}
            self.conclude(job.room, Poll.SUCCESS)

    def conclude(self, room: str, state: Poll) -> None:
        """Here, and in a message to D."""
        for manager in (self.manager, self.wanted[room][1].manager):
            manager.become(room, state)


# %% [markdown]
# ## D's loop, and both together
# D gives out blocks first, then asks. Where P is, it has asked the bootstrap server, once.


# %%
class Decode:
    """prealloc queue -> transfer queue -> waiting queue -> running (the last two are one step here)"""

    def __init__(self, num_blocks: int, bootstrap_server: dict[str, Prefill]) -> None:
        self.memory, self.free = bytearray(num_blocks * BLOCK), [*range(num_blocks)][::-1]
        self.manager, self.p = Manager(), bootstrap_server["p"]
        self.prealloc: deque[tuple[str, int]] = deque()
        self.transfer: list[str] = []
        self.running: dict[str, int] = {}  # the tokens so far: one
        self.errors: list[str] = []
        self.aux: dict[str, dict] = {}
        self.tables: dict[str, list[int]] = {}

    def tick(self) -> None:
        while self.prealloc and len(self.free) >= self.prealloc[0][1]:
            room, size = self.prealloc.popleft()
            self.tables[room] = [self.free.pop(0) for _ in range(size)]
            self.p.metadata(room, self.tables[room], self)
            self.manager.become(room, Poll.WAITING_FOR_INPUT)
            self.transfer.append(room)
        for room in filter(self.manager.ended, [*self.transfer]):
            self.transfer.remove(room)
            if self.manager.poll(room) is Poll.SUCCESS:
                assert self.aux[room]["room"] == room
                self.running[room] = self.aux[room]["first token"]
            else:
                self.errors.append(room)  # the client gets an error
                self.free += self.tables.pop(room)


class Pair:
    def __init__(self, push: str = "per_chunk", rate: int = 4, order: str = "fifo", d_blocks: int = 200) -> None:
        self.p = Prefill(push, rate, order)
        self.d = Decode(d_blocks, {"p": self.p})
        self.now, self.first_token, self.history = 0, {}, []

    def add(self, room: str, size: int) -> None:
        """The router sends the request to both."""
        self.p.bootstrap.append((room, size))
        self.d.prealloc.append((room, size))

    def tick(self) -> None:
        """The worker copies what was computed in earlier ticks, while P computes the next chunk."""
        self.now += 1
        self.d.tick()
        self.p.work()
        self.p.tick()
        self.d.tick()
        for room in self.d.running:
            self.first_token.setdefault(room, self.now)

    def busy(self) -> bool:
        return bool(self.p.bootstrap or self.p.waiting or self.p.inflight or self.d.prealloc or self.d.transfer)

    def run(self, until: Callable[[], bool] = lambda: False) -> dict[str, int]:
        while self.busy() and not until():
            self.tick()
            assert self.now < 300
        return self.first_token


# %% [markdown]
# ## One request
# 32 blocks, eight chunks. Which queue it stands in, what a poll says, how much is in D's memory.

# %%
pair = Pair()
pair.add("A", 32)
rows = [(0, "bootstrap", "BOOTSTRAPPING", "prealloc", "BOOTSTRAPPING", 0, 0)]
assert pair.p.manager.poll("A") is pair.d.manager.poll("A") is Poll.BOOTSTRAPPING and not pair.p.tables
while pair.busy():
    pair.tick()
    on_p = "waiting" if pair.p.waiting else "inflight" if pair.p.inflight else "gone"
    on_d = "transfer" if pair.d.transfer else "running"
    states = pair.p.manager.poll("A").name, pair.d.manager.poll("A").name
    rows.append((pair.now, on_p, states[0], on_d, states[1], len(pair.p.tables.get("A", [])), pair.p.copied["A"]))
show.table("the life of A", ("tick", "P's queue", "P polls", "D's queue", "D polls", "computed", "chunks sent"), rows)
assert [row[6] for row in rows[:10]] == [0, 0, 1, 2, 3, 4, 5, 6, 7, 8], "each is copied while the next is computed"
assert pair.p.early["A"] == 7 and pair.first_token == {"A": 9}
assert pair.d.running == {"A": 65}, "D's first token came with the last chunk: D has computed nothing of the prompt"
bytes_of_p = pair.p.memory[: 32 * BLOCK]
bytes_of_d = b"".join(pair.d.memory[b * BLOCK : (b + 1) * BLOCK] for b in pair.d.tables["A"])
assert bytes_of_d == bytes_of_p and len(set(bytes_of_d)) > 200 and pair.d.tables["A"] != [*range(32)]
assert len(pair.p.free) == 200, "P has let go"

# %% [markdown]
# ## What pushing each chunk saves
# n chunks, c to compute one, t to send one. Whole: all is computed, then all is sent. Per chunk: a pipeline of two stages.


# %%
def pipeline(n: int, c: Fraction, t: Fraction) -> Fraction:
    """Chunk by chunk: it can be sent when it is computed and the one before is sent."""
    computed = sent = Fraction(0)
    for _ in range(n):
        computed += c
        sent = max(sent, computed) + t
    return sent


for n, c, t in product(range(1, 12), map(Fraction, (1, 2, 5, 7)), map(Fraction, (1, 3, 5, 9))):
    assert pipeline(n, c, t) == max(n * c + t, c + n * t), "the slower stage counts n times, the other once"
    assert (n * c + n * t) - pipeline(n, c, t) == (n - 1) * min(c, t), "what is saved"
rows = []
for rate in (4, 2):
    t, times = Fraction(CHUNK, rate), {}
    for push in ("whole", "per_chunk"):
        pair = Pair(push, rate)
        pair.add("A", 32)
        times[push] = pair.run()["A"]
    assert times["whole"] == 8 + 8 * t and times["per_chunk"] == pipeline(8, Fraction(1), t)
    rows.append((rate, times["whole"], times["per_chunk"]))
show.table("ticks to the first token, 8 chunks", ("blocks sent a tick", "whole", "per chunk"), rows)
assert rows == [(4, 16, 9), (2, 24, 17)]
whole, per_chunk = 4 * 50 + 4 * 20, pipeline(4, Fraction(50), Fraction(20))
assert (whole, per_chunk) == (280, 220) and 4 * 50 + 4 * 80 == 520 and pipeline(4, Fraction(50), Fraction(80)) == 370

# %% [markdown]
# ## A long one before three short ones
# One of 32 blocks, then three of 4, sending slower than computing. Who gets the first token when?

# %%
rows = []
for push, order in product(("whole", "per_chunk"), ("fifo", "shortest")):
    pair = Pair(push, rate=2, order=order)
    for room, size in (("long", 32), ("s1", 4), ("s2", 4), ("s3", 4)):
        pair.add(room, size)
    first = pair.run()
    short = [first[room] for room in ("s1", "s2", "s3")]
    rows.append((push, order, first["long"], *short, sum(first.values()) / 4))
    for room, table in pair.d.tables.items():
        assert pair.p.copied[room] == (8 if room == "long" and push == "per_chunk" else 1) and len(table) > 3
show.table("tick of the first token", ("push", "order", "long", "s1", "s2", "s3", "mean"), rows)
assert rows[0][2:6] == rows[1][2:6] == (24, 26, 28, 30), "whole: the long one is being written, no order helps"
assert rows[2][2:6] == (17, 19, 21, 23)
assert rows[3][2:6] == (23, 11, 13, 15), "per chunk, a short one overtakes at the next border"
assert [row[6] for row in rows] == [27, 27, 20, 15.5]

# %% [markdown]
# ## Who waits with what in hand
# D has room for one of two requests. SGLang's P does not begin the second: it waits without a single block.

# %%
pair = Pair(d_blocks=40)
pair.add("A", 32)
pair.add("B", 32)
pair.run(until=lambda: "A" in pair.d.running)
for _ in range(10):
    pair.tick()
assert pair.p.bootstrap == [("B", 32)] and "B" not in pair.p.tables and len(pair.p.free) == 200
assert pair.d.prealloc[0][0] == "B" and pair.p.manager.poll("B") is Poll.BOOTSTRAPPING
pair.d.free += pair.d.tables.pop("A")  # A has ended
freed = pair.now
pair.run()
assert pair.first_token["B"] - freed == 9, "now the prompt is computed and sent"
assert 32 // 4 == 8 and 8 + 1 == 9, "had P computed it and held it, whole: 8 ticks of sending"

# %% [markdown]
# ## A chunk fails
# The third of eight. The room has failed on both sides, D gives an error to its client and frees. P finds out in its
# inflight queue: it computes the prompt to its end.

# %%
pair = Pair()
pair.add("A", 32)
pair.add("B", 32)
pair.p.fail_after = {"A": 3}
pair.run(until=lambda: bool(pair.d.errors))
assert pair.d.errors == ["A"] and len(pair.d.free) == 200 - 32 and len(pair.p.tables["A"]) == 16
pair.run()
assert pair.p.copied == {"A": 3, "B": 8} and list(pair.first_token) == ["B"], "nothing more was sent for A"
assert len(pair.p.free) == 200

# %% [markdown]
# ## nanopd: the same, for real
# A prompt of 50 tokens, 13 blocks, in chunks of 8 tokens. D asks first. After each step of P we wait for what it has
# queued. How many writes end before the prefill does?

# %%
directory = tempfile.TemporaryDirectory()
model = drive.tiny_model(Path(directory.name))
prompt = list(range(100, 150))
single = drive.Node(model, None)
single.add("r", prompt)
drive.run_nodes(single)


def counted(messages, name, original):
    """Counts the calls of a method by what is said."""

    def call(self, *arguments):
        messages[f"{name} {type(arguments[-1]).__name__}"] += 1
        return original(self, *arguments)

    return call


def writes_of(push):
    """One transfer. Returns blocks in each write, how many writes there were before the prefill ended, and messages."""
    messages: Counter[str] = Counter()
    with (
        drive.in_memory() as transport,
        patch.object(Consumer, "_send", counted(messages, "D says", Consumer._send)),
        patch.object(Producer, "_reply", counted(messages, "P says", Producer._reply)),
    ):
        p = drive.Node(model, "prefill", {"kv_push": push}, long_prefill_token_threshold=8)
        d = drive.Node(model, "decode")

        def num_blocks():
            return [sum(num_bytes for *_, num_bytes in write) // 2048 for write in transport.writes]

        d.decode("r", prompt, p)
        d.step()
        drive.run_nodes(until=lambda: "r" in p.core.connector.producer._sends)  # the Pull is there
        request, steps = p.prefill("r", prompt), 0
        while "r" not in p.answers:
            p.step()
            steps += 1
            ready = request.num_computed_tokens // 4 if push == "per_chunk" else 0
            drive.run_nodes(until=lambda ready=ready: sum(num_blocks()) >= ready)
        before = len(num_blocks())
        assert steps == 7
        drive.run_nodes(p, d)
        assert d.tokens == single.tokens
        assert d.scheduler.stats().num_scheduled_tokens == 1 + 7, "D computes one token of the prompt, for its logits"
        p.core.close()
        d.core.close()
        return num_blocks(), before, messages


rows = []
for push in ("whole", "per_chunk"):
    blocks, before, messages = writes_of(push)
    rows.append((push, before, str(blocks), ", ".join(messages)))
    assert messages == {"D says Pull": 1, "P says Done": 1}, "two messages, however many writes"
    assert (blocks, before) == {"whole": ([13], 0), "per_chunk": ([2, 2, 2, 2, 2, 2, 1], 6)}[push]
show.table("a prefill of 7 steps", ("kv_push", "writes before its end", "blocks of each", "messages"), rows)
assert [stage.name for stage in Stage] == ["STARTED", "CHUNK", "COMPLETE", "ABORTED"]

# %% [markdown]
# ## nanopd's order of sends
# A gate holds the first write back while four others are queued: of 40, 10, 30 and 20 tokens. One sender thread instead of
# ten.

# %%
SIZES = {"first": 8, "r40": 40, "r10": 10, "r30": 30, "r20": 20}


def order_of_writes(order):
    with drive.in_memory() as transport, patch("nanopd.connector.producer.NUM_SENDERS", 1):
        p, d = drive.Node(model, "prefill", {"kv_send_order": order}), drive.Node(model, "decode")
        transport.gate.clear()
        queued = p.core.connector.producer._jobs
        for i, (room, size) in enumerate(SIZES.items()):
            p.prefill(room, range(20 * i, 20 * i + size))
            drive.run_nodes(p, until=lambda room=room: room in p.answers)
            p.step()
            d.decode(room, range(20 * i, 20 * i + size), p)
            d.step()
            drive.run_nodes(until=lambda i=i: transport.writes and queued.qsize() == i)
        transport.gate.set()
        drive.run_nodes(p, d)
        p.core.close()
        d.core.close()
        by_blocks = {-(-size // 4): room for room, size in SIZES.items()}
        return [by_blocks[sum(num_bytes for *_, num_bytes in write) // 2048] for write in transport.writes]


orders = {order: order_of_writes(order) for order in ("fifo", "shortest")}
show.table("order of the writes", ("kv_send_order", *"12345"), [(name, *order) for name, order in orders.items()])
assert orders["fifo"] == ["first", "r40", "r10", "r30", "r20"]
assert orders["shortest"] == ["first", "r10", "r20", "r30", "r40"]

# %% [markdown]
# ## nanopd: a write fails
# Two requests; the transport refuses the first write. That transfer fails, no other, and D computes the prompt itself: the
# client sees the right tokens.

# %%
with drive.in_memory() as transport:
    refused, copy = [], transport.write

    def refuse_once(self, session, pieces, cancelled):
        if not refused:
            refused.append(session)
            raise TransferError("refused, to try it out")
        copy(self, session, pieces, cancelled)

    with patch.object(transport, "write", refuse_once), patch("nanopd.connector.producer.NUM_SENDERS", 1):
        p, d, alone = (drive.Node(model, role) for role in ("prefill", "decode", None))
        for i, room in enumerate(("A", "B")):
            alone.add(room, range(60 * i, 60 * i + 50))
            p.prefill(room, range(60 * i, 60 * i + 50))
            d.decode(room, range(60 * i, 60 * i + 50), p)
        drive.run_nodes(p, d)
    drive.run_nodes(alone)
    stats = d.core.connector.stats()
    assert (stats.receive_failures, stats.received) == (1, 1) and d.tokens == alone.tokens
    assert d.scheduler.stats().num_scheduled_tokens == 50 + 1 + 2 * 7, (
        "one prompt computed here, one token of the other"
    )
    p.core.close()
    d.core.close()
directory.cleanup()
assert len(MooncakeTransport.PAUSES) == 4, "over the real Mooncake a batch is tried four times before that"

# %% [markdown]
# ## Small transfers do not fill the wire
# 40 µs a piece and 1.5 GiB/s: how much of the bandwidth does one piece get?


# %%
def share(num_bytes: int) -> float:
    """Of the time that a piece takes, the part in which bytes move."""
    moving = num_bytes / (1.5 * 2**30)
    return moving / (moving + 40e-6)


rows = [(f"{size // 1024} KiB", share(size)) for size in (8 * 1024, 384 * 1024, 64 * 2**20)]
show.table("share of the bandwidth", ("piece", "share"), rows)
assert [round(100 * part) for _, part in rows] == [11, 86, 100]
extra = (16 * 1024 / (1.5 * 2**30) + 40e-6) / (8 * 1024 / (1.5 * 2**30) + 40e-6)
assert 1.11 < extra < 1.12, "twice the bytes in one piece: 11% more time"

# %% [markdown]
# ## Check yourself
# The questions of the text that are not answered above.

# %%
assert pipeline(10, Fraction(30), Fraction(10)) == 310 and 10 * 30 + 10 * 10 == 400
assert pipeline(10, Fraction(30), Fraction(5)) == 305
assert pipeline(1, Fraction(30), Fraction(10)) == 40, "one chunk: nothing is saved"
pair = Pair(rate=2, order="shortest")
for room, size in (("long", 32), ("s1", 4)):
    pair.add(room, size)
assert pair.run() == {"s1": 11, "long": 19}
