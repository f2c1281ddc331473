"""Failure drills, `nanopd pd-demo --drill NAME`: something is broken on purpose while eight requests are in flight. Rule P8.

    a drill = a point in the engine (faults.py) x what goes wrong there (FAULTS)

Each must end for every client in the right tokens, or in a clear error soon; with all blocks free on both sides, and with
sixteen more requests served rightly by whoever has survived. CELLS is the whole matrix, with what one sees. Lesson 14.
"""

import asyncio
import contextlib
import difflib
import json
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from nanopd.config import EngineConfig, UserError
from nanopd.trace.events import Transfer
from nanopd.trace.file import read

from .drill_range import BOUND, HUNG, LEFT, LOAD, SOON, Clients, Range, make_jobs
from .faults import POINTS
from .nodes import end_like_ctrl_c
from .pd_demo import Answer, Job, watched


@dataclass(frozen=True)
class Fault:
    """What goes wrong, how often and for how long."""

    kind: str  # of faults.KINDS
    what: str
    node: str = ""  # to whom, where it is not the point's own node
    part: str = "all"  # of its processes: all, server, core
    skip: int = 0  # so many calls go well before
    times: int = 1
    seconds: float = 0.0
    dies: bool = False  # a process ends
    again: bool = False  # and is started again at once


def _kill(what: str, node: str, part: str = "all", again: bool = False) -> Fault:
    return Fault("kill", what, node, part, skip=3, dies=True, again=again)


FAULTS = {
    "drop": Fault("drop", "is lost, for four of the eight", skip=2, times=4),
    "delay": Fault("delay", "waits for a second, twice", skip=2, times=2, seconds=1.0),
    "duplicate": Fault("duplicate", "happens twice, for all eight", times=8),
    "error": Fault("error", "raises, for the fourth", skip=3),
    "abort-p": Fault("abort", "P's engine ends all its requests", skip=3),
    "clients-leave": Fault("mark", "all clients close their connections", skip=3, seconds=0.3),
    "kill-p": _kill("kill -9 of P", "P"),
    "kill-p-core": _kill("kill -9 of P's engine core", "P", "core"),
    "kill-p-server": _kill("kill -9 of P's HTTP server", "P", "server"),
    "restart-p": _kill("kill -9 of P, and a new one on its ports, with empty memory", "P", again=True),
    "freeze-p": Fault("freeze", "P stands still for longer than D waits", "P", skip=3, seconds=LOAD + 1.5),
    "kill-d": _kill("kill -9 of D", "D"),
    "kill-d-core": _kill("kill -9 of D's engine core", "D", "core"),
    "kill-d-server": _kill("kill -9 of D's HTTP server", "D", "server"),
    "restart-d": _kill("kill -9 of D, and a new one on its ports, with empty memory", "D", again=True),
    "freeze-d": Fault("freeze", "D stands still for 2 s", "D", skip=3, seconds=2.0),
    "freeze-d-long": Fault("freeze", "D stands still for 9 s", "D", skip=3, seconds=9.0),
    "kill-router": _kill("kill -9 of the router", "router"),
    "freeze-router": Fault("freeze", "the router stands still for 2 s", "router", skip=3, seconds=2.0),
}
RIGHT, ERROR = "right", "error"  # what the eight may get: right tokens only, or a clear error as well


@dataclass(frozen=True)
class Cell:
    """One drill."""

    point: str
    fault: str
    see: str
    clients: str = RIGHT
    dies: str = ""  # a node that ends though nobody kills it
    quiet: bool = False  # nobody has a reason to say anything

    @property
    def name(self) -> str:
        return f"{self.point}.{self.fault}"


_D_ALONE = "D sees at once that nobody is at P's address, and computes all prompts itself; the router asks P no more."
_D_GONE = "The only D: its clients get an error at once. P's writes find nobody, and it frees its blocks."
_FROZEN_P = f"D waits {LOAD:.0f} s, computes itself, and keeps the blocks out of use until P has woken up and answered."
_SLOW_D = "All waits for D, and goes on where it stood."
CELLS = [
    Cell("router", "kill-router", "Connections break; P and D see their clients go and end those requests.", ERROR),
    Cell("router", "freeze-router", "Clients wait for two seconds, no more happens.", quiet=True),
    Cell("p-asked", "error", "P answers 500 for one request; the router asks D alone."),
    Cell("p-asked", "kill-p-server", "P's core sees that its server is gone, and ends. " + _D_ALONE),
    Cell("p-asked", "freeze-p", _FROZEN_P),
    Cell("before-pull", "drop", f"P computes and holds; D gives up after {LOAD:.0f} s, computes itself and cancels at P."),
    Cell("before-pull", "delay", "D's engine stands still; then all goes on.", quiet=True),
    Cell("before-pull", "duplicate", "P takes the second request for blocks for the first one, and sends once.", quiet=True),
    Cell("before-pull", "error", "D's engine core ends: its clients get an error at once; P lets go.", ERROR, "D"),
    Cell("before-pull", "kill-p", _D_ALONE),
    Cell("before-pull", "kill-d", _D_GONE, ERROR),
    Cell("before-pull", "freeze-p", _FROZEN_P),
    Cell("before-pull", "restart-p", _D_ALONE + " When P is back, it is used again."),
    Cell("before-pull", "clients-leave", "P and D end the requests; each tells the other, and no block stays held."),
    Cell("after-pull", "kill-p", _D_ALONE),
    Cell("after-pull", "kill-d", _D_GONE, ERROR),
    Cell("after-pull", "freeze-p", _FROZEN_P),
    Cell("after-pull", "freeze-d", _SLOW_D, quiet=True),
    Cell("after-pull", "restart-d", _D_GONE + " When D is back, it is used again.", ERROR),
    Cell("after-pull", "clients-leave", "D cancels at P; blocks P may be writing to stay out of use until it has answered."),
    Cell("prefill", "delay", "P is slow, D waits.", quiet=True),
    Cell("prefill", "error", "P's engine core ends. " + _D_ALONE, dies="P"),
    Cell("prefill", "abort-p", "P tells D at once; D computes itself."),
    Cell("prefill", "kill-p", _D_ALONE),
    Cell("prefill", "kill-p-core", "P's server says that its core has died, and ends. " + _D_ALONE),
    Cell("prefill", "kill-p-server", "P's core sees that its server is gone, and ends. " + _D_ALONE),
    Cell("prefill", "restart-p", _D_ALONE + " When P is back, it is used again."),
    Cell("prefill", "freeze-p", _FROZEN_P),
    Cell("prefill", "kill-d", _D_GONE, ERROR),
    Cell("prefill", "restart-d", _D_GONE + " When D is back, it is used again.", ERROR),
    Cell("prefill", "freeze-d", _SLOW_D, quiet=True),
    Cell("prefill", "clients-leave", "P ends the prompts half-way, and frees them once D knows."),
    Cell("prefill", "kill-router", "Connections break; P and D see their clients go and end those requests.", ERROR),
    Cell("before-write", "delay", "Blocks stay on P for a second longer.", quiet=True),
    Cell("before-write", "error", "P says Failed; D computes that prompt itself."),
    Cell("before-write", "kill-p", _D_ALONE),
    Cell("before-write", "kill-d", _D_GONE, ERROR),
    Cell("before-write", "freeze-p", _FROZEN_P),
    Cell("before-write", "clients-leave", "Cancelled before its write begins: nothing is written."),
    Cell("middle-of-write", "delay", "A half of the blocks comes a second later.", quiet=True),
    Cell("middle-of-write", "error", "What has come of that prompt is thrown away; D computes it itself."),
    Cell("middle-of-write", "kill-p", _D_ALONE),
    Cell("middle-of-write", "kill-d", _D_GONE, ERROR),
    Cell("middle-of-write", "kill-d-core", "D's server says that its core has died. " + _D_GONE, ERROR),
    Cell("middle-of-write", "restart-d", "Nothing of the old comes into the new D's memory. " + _D_GONE, ERROR),
    Cell("middle-of-write", "freeze-p", _FROZEN_P),
    Cell("middle-of-write", "freeze-d", _SLOW_D, quiet=True),
    Cell("middle-of-write", "clients-leave", "The write ends with its batch; until then D's blocks stay out of use."),
    Cell("after-write", "error", "P does not know how far the write came, says Failed, and D computes that prompt itself."),
    Cell("after-write", "kill-p", "All is written but nobody says so. " + _D_ALONE),
    Cell("after-write", "kill-d", _D_GONE, ERROR),
    Cell("done", "drop", f"All is written, D does not know: after {LOAD:.0f} s it gives up, and cancels at P."),
    Cell("done", "delay", "P's side channel stands still for a second, twice.", quiet=True),
    Cell("done", "duplicate", "The second message is about nothing that D waits for.", quiet=True),
    Cell("done", "error", "P's sending thread dies, and P's engine core with it. " + _D_ALONE, dies="P"),
    Cell("done", "kill-p", _D_ALONE),
    Cell("done", "kill-d", _D_GONE, ERROR),
    Cell("done-arrives", "delay", "D's engine stands still; then all goes on.", quiet=True),
    Cell("done-arrives", "kill-p", "Who has its blocks goes on; for the others, D computes."),
    Cell("done-arrives", "kill-d", _D_GONE, ERROR),
    Cell("promotion", "error", "D's engine core ends: its clients get an error at once.", ERROR, "D"),
    Cell("promotion", "kill-p", "Who has its blocks goes on; for the others, D computes."),
    Cell("promotion", "kill-d", _D_GONE, ERROR),
    Cell("decode", "delay", "Tokens come a second later.", quiet=True),
    Cell("decode", "error", "D's engine core ends: its clients get an error at once.", ERROR, "D"),
    Cell("decode", "kill-p", "Who has its blocks does not notice."),
    Cell("decode", "freeze-p", "Who has its blocks does not notice.", quiet=True),
    Cell("decode", "kill-d", "Streams end with an error event, other requests with status 503.", ERROR),
    Cell("decode", "kill-d-core", "D's server says so to its clients itself, and ends.", ERROR),
    Cell("decode", "kill-d-server", "D's core sees that its server is gone, and ends; streams end with an error.", ERROR),
    Cell("decode", "freeze-d", _SLOW_D, quiet=True),
    Cell("decode", "freeze-d-long", "/health is silent for 5 s: the router ends D's requests with an error.", ERROR),
    Cell("decode", "clients-leave", "D ends the requests and frees their blocks in its next step.", quiet=True),
    Cell("decode", "kill-router", "Connections break; D sees its clients go.", ERROR, quiet=True),
]  # fmt: skip
COUNT, AFTER = 8, 16


def find(name: str) -> list[Cell]:
    """The drills of this name: point.fault, point, or all. Raises UserError."""
    if cells := [cell for cell in CELLS if name in ("all", cell.name, cell.point)]:
        return cells
    close = difflib.get_close_matches(name, [cell.name for cell in CELLS] + list(POINTS), 3, 0.4)
    hint = f" Did you mean {' or '.join(close)}?" if close else ""
    raise UserError(
        f"There is no drill {name!r}.{hint} It is all, a point ({', '.join(POINTS)}) or one of those that "
        "`nanopd pd-demo --drill list` shows."
    )


# ---------------------------------------------------------------- one drill


@dataclass
class Verdict:
    """What came of a drill. `problems`: what should not have been."""

    cell: Cell
    right: int = 0
    wrong: int = 0
    errored: int = 0
    hung: int = 0
    left: int = 0
    in_flight: int = 0  # when the fault fired
    fired: int = 0
    leaked: int = 0
    after: int = 0  # of the sixteen
    seconds: float = 0.0  # from the fault until all had their answer and all blocks were free
    said: dict[str, list[str]] = field(default_factory=dict)  # new lines of the logs, by node
    moved: dict[str, float] = field(default_factory=dict)  # metrics of failures
    problems: list[str] = field(default_factory=list)

    def count(self, answers: Iterable[Answer], expected: Iterable[list[str]]) -> None:
        for answer, tokens in zip(answers, expected, strict=True):
            if answer.error in (HUNG, LEFT):
                self.hung += answer.error == HUNG
                self.left += answer.error == LEFT
            elif answer.error:
                self.errored += 1
            else:
                self.right += answer.tokens == tokens
                self.wrong += answer.tokens != tokens

    def row(self) -> dict[str, Any]:
        names = "right", "errored", "hung", "leaked", "wrong", "left", "in_flight", "fired", "after"
        row = {"drill": self.cell.name} | {name: getattr(self, name) for name in names}
        lines = sum(map(len, self.said.values()))
        row |= {"seconds": round(self.seconds, 2), "lines": lines, "moved": self.moved}
        return row | {"ok": not self.problems, "problems": self.problems}


class Drills:
    """The prompts, what must come of them, and how a drill goes."""

    def __init__(self, range: Range, console: Console, live: bool = False) -> None:
        self.range, self.console, self.live = range, console, live
        self.jobs, self.more = make_jobs(COUNT, 1), make_jobs(AFTER, 2)
        self.expected: dict[str, list[str]] = {}

    async def ask_alone(self) -> None:
        """What D answers without P: that is what must come each time."""
        for jobs in (self.jobs, self.more):
            answers = await self.range.clients("D").ask_all(jobs)
            if failed := [answer.error for answer in answers.values() if answer.error]:
                raise UserError(f"D alone cannot answer: {failed[0]}")
            self.expected |= {name: answer.tokens for name, answer in answers.items()}

    async def restore(self) -> None:
        """All nodes are there, as before the first drill."""
        r = self.range
        for name in r.dead:
            r.kill(name)
        if dead := r.dead:
            await r.start(*dead)
        if not await r.wait_up():
            raise RuntimeError("the router does not see both nodes")
        await r.leaked("P", "D")

    def armed(self, cell: Cell) -> dict[str, Any]:
        point, fault = POINTS[cell.point], FAULTS[cell.fault]
        pids = self.range.nodes[fault.node].pids if fault.node else []
        pids = {"all": pids[::-1], "server": pids[:1], "core": pids[1:]}[fault.part]
        what = {"node": point.node, "point": cell.point, "kind": fault.kind, "seconds": fault.seconds, "pids": pids}
        # Steps are many, and the first of them hold few requests; a transfer is one of eight.
        return what | {"skip": {"prefill": 2, "decode": 4}.get(cell.point, fault.skip), "times": fault.times}

    async def run(self, cell: Cell) -> Verdict:
        """One drill, from whole nodes to whole nodes."""
        r, fault, verdict = self.range, FAULTS[cell.fault], Verdict(cell)
        await self.restore()
        for node in r.nodes.values():
            node.new_lines()
        before = await r.metrics(*r.nodes)
        clients = r.clients()
        r.arm(self.armed(cell))
        directing = asyncio.create_task(self._direct(fault, clients, verdict))
        try:
            urls = r.nodes["P"].url, r.nodes["D"].url
            asking = watched(clients, self.jobs, urls, self.console) if self.live else clients.ask_all(self.jobs)
            answers = await asking
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(directing, BOUND)
        finally:
            directing.cancel()
            for node in r.nodes.values():
                r.signal(node.pids, signal.SIGCONT)
        verdict.count((answers[job.name] for job in self.jobs), (self.expected[job.name] for job in self.jobs))
        await self._check_who_died(cell, fault, verdict)
        alive = [name for name in "PD" if name not in r.dead]
        verdict.leaked = await r.leaked(*alive)
        rows = r.fired()
        verdict.fired = len(rows)
        verdict.seconds = time.monotonic() - rows[0]["time"] if rows else 0.0
        r.arm()
        verdict.said = {name: node.new_lines() for name, node in r.nodes.items()}
        after = await r.metrics(*(name for name in r.nodes if name not in r.dead))
        moved = {what: number - before.get(what, 0.0) for what, number in after.items()}
        news = {what: n for what, n in moved.items() if n > 0 or (n and "node_up" in what)}
        verdict.moved = {what: n for what, n in news.items() if "failures" in what or "router" in what}
        await self._sixteen(verdict, alive)
        self._judge(verdict)
        return verdict

    async def _direct(self, fault: Fault, clients: Clients, verdict: Verdict) -> None:
        """Waits for the fault, and does what its victims cannot do themselves."""
        r = self.range
        while not r.fired():
            await asyncio.sleep(0.005)
        verdict.in_flight = sum(not task.done() for task in clients.tasks)
        if self.live:
            now = time.monotonic() - clients.start
            self.console.print(f"{now:7.2f} s  >  {verdict.cell.name}: {fault.what}", style="bold red", soft_wrap=True)
        if fault.kind == "mark":
            for task in clients.tasks:
                task.cancel()
        if fault.kind == "freeze":
            await asyncio.sleep(fault.seconds)
            r.signal(r.nodes[fault.node].pids, signal.SIGCONT)
        if fault.again:
            await r.start(fault.node)

    async def _check_who_died(self, cell: Cell, fault: Fault, verdict: Verdict) -> None:
        """Those who should, and nobody else."""
        r = self.range
        dies = {fault.node} if fault.dies and not fault.again else {cell.dies} - {""}
        for name in dies:  # server and core: neither stays alone
            if not await r.until(lambda n=name: all(not r.runs(pid) for pid in r.nodes[n].pids), SOON):
                verdict.problems.append(f"a part of {name} still runs")
        if unexpected := set(r.dead) - dies:
            verdict.problems.append(f"{', '.join(sorted(unexpected))} ended")

    async def _sixteen(self, verdict: Verdict, alive: list[str]) -> None:
        """More requests, to whoever is there."""
        r = self.range
        if "router" in r.dead:
            await r.start("router")
        if "D" in alive and not await r.wait_up(*alive):
            verdict.problems.append("the router does not see that a node is up")
        before = (await r.metrics("D")).get("D kv_transfer_received_total", 0.0) if "D" in alive else 0.0
        clients = r.clients("router" if "D" in alive else "P")
        answers = await clients.ask_all(self.more)
        verdict.after = sum(answers[job.name].tokens == self.expected[job.name] for job in self.more)
        if errors := {answer.error for answer in answers.values()} - {None}:
            verdict.problems.append(f"afterwards: {sorted(map(str, errors))[0]}")
        verdict.leaked += await r.leaked(*alive)
        if len(alive) == 2 and (await r.metrics("D")).get("D kv_transfer_received_total", 0.0) == before:
            verdict.problems.append("afterwards nothing came from P")

    @staticmethod
    def _judge(v: Verdict) -> None:
        leave = FAULTS[v.cell.fault].kind == "mark"
        wrong = {
            "the fault never fired": not v.fired,
            f"{v.hung} requests hung": v.hung,
            f"{v.wrong} requests got wrong tokens": v.wrong,
            f"{v.errored} requests failed": v.errored and v.cell.clients == RIGHT,
            f"{v.leaked} blocks leaked": v.leaked,
            f"{AFTER - v.after} of {AFTER} more were not right": v.after < AFTER,
            "some requests have no verdict": v.right + v.wrong + v.errored + v.hung + v.left != COUNT,
            "nobody said a word": not v.cell.quiet and not any(v.said.values()),
            "clients did not leave": leave and v.left + v.right != COUNT,
        }
        v.problems += [problem for problem, holds in wrong.items() if holds]


# ---------------------------------------------------------------- what is shown


def print_list(as_json: bool) -> None:
    """The matrix, a line a drill."""
    for cell in CELLS:
        row = {"drill": cell.name, "when": POINTS[cell.point].what, "what": FAULTS[cell.fault].what, "see": cell.see}
        print(json.dumps(row) if as_json else f"{cell.name:30} {cell.see}")


def print_verdicts(verdicts: list[Verdict], console: Console) -> None:
    """One line a drill."""
    table = Table(box=None, padding=(0, 1), header_style="bold")
    heads = "right", "errored", "left", "hung", "wrong", "blocks\nleaked", "seconds to\nrecovery", "then\nright"
    table.add_column("drill", vertical="bottom", min_width=max(len(v.cell.name) for v in verdicts))
    for head in heads:
        table.add_column(head, justify="right", vertical="bottom")
    table.add_column("verdict", vertical="bottom")
    for v in verdicts:
        numbers = v.right, v.errored, v.left, v.hung, v.wrong, v.leaked, f"{v.seconds:.1f}", f"{v.after}/{AFTER}"
        verdict = "; ".join(v.problems) or "ok"
        table.add_row(v.cell.name, *(str(n) if n else "" for n in numbers), verdict, style="red" if v.problems else "")
    console.print(table)
    good = sum(not v.problems for v in verdicts)
    console.print(
        "right, errored, left (by themselves), hung, wrong: the eight clients; leaked: blocks on both sides; recovery: from "
        "the fault until all had their answer and all blocks were free; then: sixteen more, by whoever survived.",
        style="dim",
    )
    console.print(f"{good} of {len(verdicts)} drills ended as they should", style="bold")


def print_story(verdict: Verdict, jobs: list[Job], directory: Path, console: Console) -> None:
    """What each side knew when, what it said, and which metrics moved."""
    console.print("\nWhat each side knew of each transfer:", style="bold")
    history: dict[str, dict[str, list[str]]] = {}
    start: float | None = None
    for name in "PD":
        _, lines = read(directory / f"{name}.jsonl")
        for line in lines:
            event = line.event
            if isinstance(event, Transfer) and any(event.request_id.startswith(f"{job.name}-") for job in jobs):
                start = start or line.time
                about = f" ({event.about})" if event.about and event.state != "asked" else ""
                step = f"{line.time - start:.2f} s {event.state}{about}"
                history.setdefault(event.request_id, {}).setdefault(name, []).append(step)
    for request, sides in sorted(history.items()):
        for name, steps in sides.items():
            console.print(f"  {request:12} {name}  {' -> '.join(steps)}", markup=False, soft_wrap=True)
    console.print("\nWhat an operator sees in the logs:", style="bold")
    for name, lines in verdict.said.items():  # type: ignore[assignment]
        for said in lines:
            console.print(f"  {name:6} | {said}", markup=False, soft_wrap=True)
    console.print("\nMetrics that moved:", style="bold")
    for what, number in verdict.moved.items():
        console.print(f"  {what} {number:+g}", markup=False)


def run(name: str, engine: EngineConfig, as_json: bool) -> int:
    """The command. Exit code 0 if all drills ended as they should, else 1."""
    console = Console(stderr=as_json, highlight=False)
    if name == "list":
        print_list(as_json)
        return 0
    cells = find(name)
    end_like_ctrl_c()
    verdicts = asyncio.run(_run(cells, engine, as_json, console))
    if not as_json:
        print_verdicts(verdicts, console)
    return int(any(v.problems for v in verdicts))


async def _run(cells: list[Cell], engine: EngineConfig, as_json: bool, console: Console) -> list[Verdict]:
    single, verdicts = len(cells) == 1, list[Verdict]()
    async with Range(console, engine, trace=single) as range:
        drills = Drills(range, console, live=single)
        await drills.ask_alone()
        for i, cell in enumerate(cells, 1):
            when, what = POINTS[cell.point].what, FAULTS[cell.fault].what
            console.print(f"[{i}/{len(cells)}] {cell.name}: when {when}: {what}.", style="bold", markup=False)
            console.print(f"    {cell.see}", markup=False)
            verdicts.append(verdict := await drills.run(cell))
            if as_json:
                print(json.dumps(verdict.row()), flush=True)
            if single:
                print_story(verdict, drills.jobs, range.directory, console)
            elif verdict.problems:
                console.print(f"    {'; '.join(verdict.problems)}", style="red")
    return verdicts
