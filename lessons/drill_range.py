"""Where drills take place: a prefill node (P), a decode node (D) and a router as real processes, which can be killed,
frozen and started again on the ports they had, and whose engines have the points of faults.py.

A Range knows nothing of single drills (drills.py): it arms faults, asks, and tells how the nodes stand. Nothing here looks
into a process: all comes from what any operator has: HTTP, the nodes' logs, their ids.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import secrets
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from rich.console import Console

from nanopd.config import EngineConfig

from . import drive, faults
from .nodes import Process, Processes, as_options
from .pd_demo import Answer, Client, Job

HOLD, LOAD = 5.0, 3.0  # --kv-hold-timeout, --kv-load-timeout: short, for somebody waits
BOUND = 25.0  # seconds until a request counts as hung, on a busy machine; what is awaited takes half of it at most
SOON = 15.0  # seconds for blocks to be free again, for a node to be seen as up, and the like
NUM_BLOCKS = 700
HUNG, LEFT = "hung", "left"  # in Answer.error: no answer in time; we went away ourselves
SITE = Path(__file__).parent / "faults_site"
ROLES = {"P": "prefill", "D": "decode"}


def make_jobs(count: int, seed: int, tokens: Sequence[int] = (280, 320)) -> list[Job]:
    """Prompts of token ids, new with each seed; every fourth begins like the first."""
    chance = random.Random(seed)
    shared, jobs = [chance.randrange(256) for _ in range(min(tokens) * 2 // 3)], []
    for i in range(count):
        prompt = shared if i % 4 == 0 else []
        length = chance.randint(*tokens) - len(prompt)
        jobs.append(Job(f"{seed}-{i}", prompt + [chance.randrange(256) for _ in range(length)]))
    return jobs


class Clients(Client):
    """Sends jobs all at once, every second one as a stream. `tasks` can be cancelled: a client that goes away."""

    def __init__(self, session: aiohttp.ClientSession, url: str, max_tokens: int, bound: float = BOUND) -> None:
        super().__init__(session, url, max_tokens)
        self.bound, self.tasks = bound, list[asyncio.Task[None]]()

    async def ask_all(self, jobs: list[Job]) -> dict[str, Answer]:
        """None waits for longer than `bound`."""
        self.start = time.monotonic()
        self.tasks = [asyncio.create_task(self.one(job, i % 2 == 1)) for i, job in enumerate(jobs)]
        _, pending = await asyncio.wait(self.tasks, timeout=self.bound)
        for task, job in zip(self.tasks, jobs):
            if task in pending:
                task.cancel()
                self.answers[job.name].error = HUNG
        await asyncio.gather(*self.tasks, return_exceptions=True)
        return self.answers

    async def one(self, job: Job, stream: bool) -> None:
        """One job; errors are in its answer."""
        answer = self.answers[job.name] = Answer(time.monotonic() - self.start)
        body: dict[str, Any] = {
            "prompt": job.prompt,
            "stream": stream,
            "return_token_ids": True,
            "cache_salt": self.run,
        }
        body |= {"temperature": 0, "max_tokens": job.max_tokens or self.max_tokens, "ignore_eos": True}
        asking = self.session.post(f"{self.url}/v1/completions", json=body, headers={"X-Request-Id": self.id_of(job)})
        try:
            async with asking as response:
                if stream and response.status == 200:
                    async for line in response.content:
                        if line.startswith(b"data: {"):
                            self._take(answer, json.loads(line[len(b"data: ") :]))
                else:
                    self._take(answer, await response.json(content_type=None))
            if answer.error is None and answer.finish_reason is None:
                answer.error = "the answer ended too early"
        except (aiohttp.ClientError, TimeoutError, ValueError) as failure:
            answer.error = f"{type(failure).__name__}: {failure}"
        except asyncio.CancelledError:
            answer.error = answer.error or LEFT
            raise
        finally:
            answer.ended = time.monotonic() - self.start

    def _take(self, answer: Answer, event: dict[str, Any]) -> None:
        if "error" in event:
            answer.error = event["error"]["message"]
            return
        answer.first = answer.first or time.monotonic() - self.start
        for choice in event["choices"]:
            answer.tokens += map(str, choice["token_ids"])
            answer.finish_reason = choice["finish_reason"] or answer.finish_reason
        answer.metrics = event.get("metrics") or answer.metrics


@dataclass
class Running:
    """One node: how it is started, and the process that runs now."""

    command: list[str]
    process: Process
    pids: list[int] = field(default_factory=list)  # its server, its engine core
    url: str = ""
    kv_port: int = 0
    read: int = 0  # bytes of its log that were looked at

    @property
    def alive(self) -> bool:
        return self.process.popen.poll() is None

    def new_lines(self) -> list[str]:
        """What it has said since the last call."""
        said = self.process.log.read_bytes()[self.read :]
        self.read += len(said)
        return said.decode(errors="replace").splitlines()


class Range:
    """P, D and a router.

    Args:
        console: is told what starts.
        engine: options of P and D; without a model it is a small random one.
        trace: write P.jsonl and D.jsonl to `directory`.
        options: more of the command line, by node.
    """

    def __init__(
        self,
        console: Console,
        engine: EngineConfig | None = None,
        trace: bool = False,
        options: dict[str, list[str]] | None = None,
    ) -> None:
        self.processes, self.trace, self.more = Processes(console), trace, options or {}
        self.directory = self.processes.directory
        engine = engine or EngineConfig()
        model = engine.model or str(drive.byte_tokenizer(drive.tiny_model(self.directory / "tiny", 3, tied=False)))
        # P takes several steps for a prompt, so that all eight are under way when something happens.
        threshold, blocks = engine.long_prefill_token_threshold or 64, engine.num_blocks or NUM_BLOCKS
        self.engine = replace(
            engine,
            model=model,
            dtype="float32",
            num_blocks=blocks,
            check_invariants=True,
            long_prefill_token_threshold=threshold,
        )
        self.nodes: dict[str, Running] = {}
        self.file = self.directory / "faults.json"
        self.file.write_text("[]")
        self.starts = 0

    async def __aenter__(self) -> "Range":
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        try:
            await self.start("P", "D")
            await self.start("router")
            await self.wait_up()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for running in self.nodes.values():
            self.signal(running.pids, signal.SIGCONT)
        await self.session.close()
        self.processes.__exit__(None, None, None)

    # ---------------------------------------------------------------- processes

    def _command(self, name: str) -> list[str]:
        if name == "router":
            urls = [f"--{ROLES[node]}={self.nodes[node].url}" for node in "PD"]
            return ["route", "--port=0", "--health-interval=0.3", *urls, *self.more.get(name, [])]
        times = [f"--kv-hold-timeout={HOLD}", f"--kv-load-timeout={LOAD}", "--shutdown-timeout=1"]
        trace = [f"--trace={self.directory / name}.jsonl"] if self.trace else []
        what = ["serve", f"--role={ROLES[name]}", "--port=0", "--kv-port=0", *times, *trace]
        return [*what, *as_options(self.engine), *self.more.get(name, [])]

    async def start(self, *names: str) -> None:
        """Starts these; those that have run before come to the ports they had."""
        for name in names:
            if before := self.nodes.get(name):
                await self.until(lambda b=before: not any(map(_runs, b.pids)), 10)
            command = before.command if before else self._command(name)
            environment = {faults.FILE: str(self.file), faults.NODE: name, "PYTHONPATH": self._python_path()}
            self.starts += 1
            process = self.processes.start(f"{name} {self.starts}", *command, environment=environment)
            self.nodes[name] = Running(command, process)
        started = [self.nodes[name] for name in names]
        await self.processes.wait("Listening on " if names == ("router",) else "Ready.", *(r.process for r in started))
        for name in names:
            running = self.nodes[name]
            pid, running.url = running.process.popen.pid, running.process.url
            running.pids = [pid, *(child.pid for child in psutil.Process(pid).children())]
            port = int(running.url.rsplit(":", 1)[1])
            kv = (await self.get(name, "/health"))["kv_port"] if name in ROLES else 0
            ports = {"--port=0": f"--port={port}", "--kv-port=0": f"--kv-port={kv or 0}"}
            running.command = [ports.get(word, word) for word in running.command]
            running.new_lines()

    @staticmethod
    def _python_path() -> str:
        return os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])])

    @staticmethod
    def signal(pids: Iterable[int], number: int) -> None:
        """To all of them that still are there."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self, name: str) -> None:
        """kill -9, server and engine core."""
        self.signal(self.nodes[name].pids, signal.SIGKILL)

    @staticmethod
    def runs(pid: int) -> bool:
        """Whether this process does; a zombie does not."""
        return _runs(pid)

    @property
    def dead(self) -> list[str]:
        """Nodes of which a process is gone, or about to go."""
        return [n for n, r in self.nodes.items() if not r.alive or not all(map(_runs, r.pids))]

    # ---------------------------------------------------------------- faults

    def arm(self, *armed: dict[str, Any]) -> None:
        """These, and no others, wait for their points from now on."""
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps([{"id": secrets.token_hex(4)} | fault for fault in armed]))
        self.file.with_suffix(".log").unlink(missing_ok=True)
        new.rename(self.file)

    def fired(self) -> list[dict[str, Any]]:
        """Those that have happened since."""
        log = self.file.with_suffix(".log")
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    # ---------------------------------------------------------------- how the nodes stand

    async def get(self, name: str, path: str, timeout: float = 5.0) -> Any:
        """JSON, or text."""
        limit = aiohttp.ClientTimeout(timeout)
        async with self.session.get(self.nodes[name].url + path, timeout=limit) as response:
            return await (response.json() if response.content_type == "application/json" else response.text())

    async def state(self, name: str) -> dict[str, Any] | None:
        """/debug/state, if it answers."""
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            state = await self.get(name, "/debug/state")
            return dict(state) if "free_blocks" in state else None
        return None

    async def leaked(self, *names: str, seconds: float = SOON) -> int:
        """How many blocks are not free, at nodes that have nothing to do: looks until none is, or the time is over."""
        end, held = time.monotonic() + seconds, 0
        while True:
            states = [await self.state(name) for name in names]
            held = sum(s["num_blocks"] - s["free_blocks"] + len(s["reclaiming"]) if s else NUM_BLOCKS for s in states)
            if not held or time.monotonic() > end:
                return held
            await asyncio.sleep(0.03)

    async def metrics(self, *names: str) -> dict[str, float]:
        """`node name{labels}` -> number."""
        found: dict[str, float] = {}
        for name in names:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                lines = re.findall(r"^nanopd:(\w+(?:{.*})?) (\S+)$", await self.get(name, "/metrics"), re.M)
                found |= {f"{name} {what}": float(number) for what, number in lines}
        return found

    async def wait_up(self, *names: str) -> bool:
        """Until the router knows these nodes (all, without names) as up."""

        async def up() -> bool:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                health = await self.get("router", "/health")
                return all(node["up"] for name in names or "PD" for node in health[ROLES[name]])
            return False

        end = time.monotonic() + SOON
        while not (known := await up()) and time.monotonic() < end:
            await asyncio.sleep(0.03)
        return known

    @staticmethod
    async def until(condition: Any, seconds: float) -> bool:
        """Whether it came true in this time."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                return False
            await asyncio.sleep(0.01)
        return True

    def clients(self, name: str = "router", max_tokens: int = 48, bound: float = BOUND) -> Clients:
        """Who will ask this node."""
        return Clients(self.session, self.nodes[name].url, max_tokens, bound)


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
