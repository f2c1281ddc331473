"""Random load and random faults, for as long as one likes: what the drills do one by one, all at once. Rule P8.

Clients come and go: long and short prompts, shared beginnings, streams, some that hang up. Every few seconds something
breaks: a message is lost or said twice, a write fails, a node stands still or dies and comes back. Every answer is compared
with the one that was computed without P; at the end all must be free. Between two deaths of a process its memory is watched.
"""

import asyncio
import contextlib
import random
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import psutil
from rich.console import Console

from .drill_range import BOUND, HUNG, LEFT, LOAD, Clients, Range, make_jobs
from .faults import POINTS
from .pd_demo import Job

MESSAGES = ("before-pull", "cancel", "done", "failed")
# Point, kind; a dash: at any time, whatever the engine does. Those that end a process come more seldom: to start one takes
# long, and memory that grows is seen in those that live long.
MILD = [
    *((point, kind) for point in MESSAGES for kind in ("drop", "duplicate", "delay")),
    *((point, kind) for point in ("before-write", "middle-of-write", "after-write") for kind in ("delay", "error")),
    *((point, "delay") for point in ("after-pull", "done-arrives", "promotion", "prefill", "decode")),
    ("prefill", "abort"),
    ("p-asked", "error"),
    ("-", "freeze P"),
    ("-", "freeze D"),
]
DEADLY = [
    *(("-", kind) for kind in ("kill P", "kill D", "kill P's core", "kill D's core")),
    *((point, "kill P") for point in ("middle-of-write", "done", "prefill")),
    *((point, "kill D") for point in ("middle-of-write", "after-pull")),
]
POOL = {"P": 160, "D": 320}  # blocks: few enough that requests wait for each other, and P preempts


@dataclass
class Tally:
    """What came of it."""

    requests: int = 0
    right: int = 0
    wrong: int = 0
    errored: int = 0
    left: int = 0
    hung: int = 0
    leaked: int = 0
    faults: dict[str, int] = field(default_factory=dict)  # those that fired
    deaths: int = 0
    unexpected: list[str] = field(default_factory=list)  # nodes that ended though nobody killed them
    resident: dict[str, list[float]] = field(default_factory=dict)  # MiB, once a second, by node and process id
    preemptions: int = 0
    received: int = 0
    slowest: float = 0.0  # seconds

    @property
    def growth(self) -> float:
        """The most that a process grew, in MiB, from the middle of its life to its end; if it lived for 40 s."""
        lives = [sizes for sizes in self.resident.values() if len(sizes) >= 40]
        return max((max(s[-5:]) - max(s[len(s) // 2 : len(s) // 2 + 5]) for s in lives), default=0.0)

    def row(self) -> dict[str, Any]:
        names = "requests", "right", "wrong", "errored", "left", "hung", "leaked", "deaths", "preemptions", "received"
        row: dict[str, Any] = {name: getattr(self, name) for name in names}
        row |= {"faults": sum(self.faults.values()), "kinds": len(self.faults), "slowest": round(self.slowest, 1)}
        return row | {"growth_mib": round(self.growth, 1), "unexpected": self.unexpected}


class Soak:
    """The load, the faults and the count."""

    def __init__(self, range: Range, seed: int, at_once: int = 8) -> None:
        self.range, self.chance, self.at_once, self.tally = range, random.Random(seed), at_once, Tally()
        lengths = [(20, 60)] * 3 + [(200, 400)] * 4 + [(700, 1000)]
        self.jobs: list[Job] = []
        for i, tokens in enumerate(lengths * 3):
            for job in make_jobs(5, 100 + i, tokens):
                job_tokens = self.chance.choice((4, 16, 60))
                self.jobs.append(Job(job.name, job.prompt, max_tokens=job_tokens))
        self.expected: dict[str, list[str]] = {}
        self.numbers = iter(range_of_names())
        self.killed: set[str] = set()

    async def run(self, seconds: float, between: float) -> Tally:
        """Load for so long, with a fault about each `between` seconds."""
        answers = await self.range.clients("D", bound=10 * BOUND).ask_all(self.jobs)
        assert not any(answer.error for answer in answers.values()), answers
        self.expected = {name: answer.tokens for name, answer in answers.items()}
        end = time.monotonic() + seconds
        clients = [asyncio.create_task(self._client(end)) for _ in range(self.at_once)]
        watching = asyncio.create_task(self._watch())
        try:
            while time.monotonic() < end:
                await asyncio.sleep(self.chance.uniform(0.5, 1.5) * between)
                await self._break_something()
            await asyncio.gather(*clients)
            await self._mend()
            self.tally.leaked = await self.range.leaked("P", "D", seconds=2 * BOUND)
            await self._count()
        finally:
            for task in (*clients, watching):
                task.cancel()
        return self.tally

    async def _client(self, end: float) -> None:
        """One client after the other; each asks once."""
        r, tally = self.range, self.tally
        while time.monotonic() < end:
            job = self.chance.choice(self.jobs)
            clients = Clients(r.session, r.nodes["router"].url, 0, 2 * BOUND)
            clients.run = next(self.numbers) if self.chance.random() < 0.7 else "shared"  # salt: what may be found
            name = Job(f"{job.name}-{next(self.numbers)}", job.prompt, max_tokens=job.max_tokens)
            asking = asyncio.create_task(clients.ask_all([name]))
            if self.chance.random() < 0.15:
                await asyncio.sleep(self.chance.uniform(0, 0.5))
                for task in clients.tasks:
                    task.cancel()
            answer = (await asking)[name.name]
            tally.requests += 1
            if answer.error in (HUNG, LEFT):
                tally.hung += answer.error == HUNG
                tally.left += answer.error == LEFT
            elif answer.error:
                tally.errored += 1
                await asyncio.sleep(1.0)  # as Retry-After says
            else:
                tally.right += answer.tokens == self.expected[job.name]
                tally.wrong += answer.tokens != self.expected[job.name]
                tally.slowest = max(tally.slowest, answer.ended - answer.sent)

    async def _break_something(self) -> None:
        """Arms a fault, waits until it has fired (or would not), and mends what it broke."""
        r, (point, what) = self.range, self.chance.choice(DEADLY if self.chance.random() < 0.12 else MILD)
        kind, _, who = what.partition(" ")
        node, part = who[:1], slice(1, None) if who.endswith("core") else slice(None)
        pids = r.nodes[node].pids[part][::-1] if node else []
        if kind == "kill":
            await self._count()  # its numbers die with it
        if point == "-":
            r.signal(pids, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            fired = True
        else:
            seconds = self.chance.uniform(0.1, 1.0)
            fault = {"node": POINTS[point].node, "point": point, "kind": kind, "pids": pids, "seconds": seconds}
            r.arm(fault | {"skip": self.chance.randrange(3), "times": 1 if kind in ("kill", "abort") else 3})
            fired = await r.until(r.fired, 3.0)
            if kind not in ("kill", "abort"):
                await asyncio.sleep(0.5)
            r.arm()
        if fired:
            name = f"{point}.{what}"
            self.tally.faults[name] = self.tally.faults.get(name, 0) + 1
        if kind == "freeze":
            await asyncio.sleep(self.chance.uniform(0.5, 2.0) * LOAD)
            r.signal(pids, signal.SIGCONT)
        if kind == "kill" and fired:
            self.killed.add(node)
            self.tally.deaths += 1
            await r.until(lambda: not any(map(r.runs, r.nodes[node].pids)), 10)
        await self._mend()

    async def _mend(self) -> None:
        """Starts what is dead; notes who should not be."""
        r = self.range
        for name in list(r.dead):
            if name not in self.killed:
                self.tally.unexpected.append(f"{name}: {' / '.join(r.nodes[name].new_lines()[-3:])}")
                r.kill(name)
            await r.start(name)
        self.killed.clear()

    async def _watch(self) -> None:
        """How large the processes are."""
        while True:
            for name, running in self.range.nodes.items():
                for pid in running.pids:
                    with contextlib.suppress(psutil.Error):
                        size = psutil.Process(pid).memory_info().rss / 2**20
                        self.tally.resident.setdefault(f"{name} {pid}", []).append(size)
            await asyncio.sleep(1.0)

    async def _count(self) -> None:
        numbers = await self.range.metrics("P", "D")
        self.tally.preemptions += int(sum(numbers.get(f"{n} num_preemptions_total", 0) for n in "PD"))
        self.tally.received += int(numbers.get("D kv_transfer_received_total", 0))


def range_of_names() -> Any:
    """Names that do not come twice."""
    i = 0
    while True:
        i += 1
        yield f"n{i}"


async def soak(seconds: float, seed: int, between: float = 3.0, console: Console | None = None) -> Tally:
    """All of it, with nodes of its own: P pushes prompts in chunks, and both have few blocks."""
    options = {"P": ["--kv-push=per_chunk", f"--num-blocks={POOL['P']}"], "D": [f"--num-blocks={POOL['D']}"]}
    async with Range(console or Console(quiet=True), options=options) as r:
        return await Soak(r, seed).run(seconds, between)
