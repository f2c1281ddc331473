"""P/D as its users have it: real processes, the real Mooncake between them, HTTP at the front.

The model is tiny and random, knows 2,048 positions, and its tokenizer gives each of the 300 ids a text of its own: so equal
texts are equal tokens, which is how answers are compared with those of one engine in this process (`alone`).
"""

import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
import psutil
import pytest

from nanopd.config import SamplingParams
from nanopd.engine.llm import LLM
from tests.engine.conftest import VOCAB_SIZE, _save
from tests.serve.conftest import Server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GREEDY = {"temperature": 0, "ignore_eos": True, "skip_special_tokens": False}


@pytest.fixture(scope="session")
def pd_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = _save(tmp_path_factory.mktemp("models") / "tiny-pd", "Llama", tie_word_embeddings=False)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["decoder"] = {"type": "Fuse"}  # not ByteLevel, for which most ids are no text by themselves
    tokenizer["model"]["vocab"] |= {"<eos>": 256} | {chr(0x4E00 + i): i for i in range(257, VOCAB_SIZE)}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


# ---------------------------------------------------------------- what is asked, and what must come


@dataclass
class Job:
    """One request, and the text it must bring."""

    prompt: list[int]
    max_tokens: int
    text: str = ""

    @property
    def body(self) -> dict[str, Any]:
        return GREEDY | {"prompt": self.prompt, "max_tokens": self.max_tokens}


Alone = Callable[[Iterable[Job]], list[Job]]


@pytest.fixture(scope="session")
def alone(pd_model: Path) -> Alone:
    """Fills in what a single engine answers; also its cache is its own."""
    llm = LLM(str(pd_model), dtype="float32", num_blocks=4000)
    texts = [llm.tokenizer.decode([i], skip_special_tokens=False) for i in range(VOCAB_SIZE)]
    assert len(set(texts)) == VOCAB_SIZE and all(texts)

    def fill_in(jobs: Iterable[Job]) -> list[Job]:
        jobs = list(jobs)
        params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=job.max_tokens) for job in jobs]
        for job, output in zip(jobs, llm.generate([job.prompt for job in jobs], params)):
            job.text = "".join(texts[i] for i in output.outputs[0].token_ids)
        return jobs

    return fill_in


def make_jobs(count: int, seed: int, lengths: Sequence[int], outputs: tuple[int, int] = (8, 60)) -> list[Job]:
    """Prompts of these lengths in turn; every third one begins like the first, as far as it goes."""
    rng = random.Random(seed)
    shared, jobs = [rng.randrange(256) for _ in range(1000)], []
    for i in range(count):
        length = lengths[i % len(lengths)]
        prompt = shared[: length * 2 // 3] if i % 3 == 0 else []
        jobs.append(Job(prompt + [rng.randrange(256) for _ in range(length - len(prompt))], rng.randint(*outputs)))
    return jobs


# ---------------------------------------------------------------- processes


class Process(Server):
    """Any server of ours, or another's, as a process; `kill` ends it for certain."""

    sign = "Listening on http://"

    def __init__(self, *command: str) -> None:
        self.stderr = []
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        self.api_pid, self._wait_ready = self.process.pid, False
        self._start_reader()

    def _start_reader(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def base_url(self) -> str:
        return "http://" + self.wait_for(self.sign).split()[0]

    def __enter__(self) -> "Process":
        try:
            self.wait_for(self.sign)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.kill()


class Router(Process):
    """`nanopd route`"""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str], *options: str) -> None:
        nodes = [f"--prefill={url}" for url in prefill] + [f"--decode={url}" for url in decode]
        super().__init__(sys.executable, "-m", "nanopd", "route", "--port=0", "--health-interval=0.2", *nodes, *options)

    def wait_up(self, side: str, up: bool, seconds: float = 10.0) -> None:
        """Until all nodes of one side, "prefill" or "decode", are known to be up, or down."""
        wait_until(lambda: {node["up"] for node in self.request("/health")[1][side]} == {up}, seconds)


class Node(Server):
    """`nanopd serve` as P or D (or, without a role, alone). `kill` takes its engine core with it."""

    _told = False

    def __init__(self, model: Path | str, role: str | None, *options: str) -> None:
        super().__init__(model, "--dtype=float32", *(("--role", role) if role else ()), *options)

    def __enter__(self) -> "Node":
        super().__enter__()
        self.pids = (self.api_pid, self.core_pid)
        self.kv_port = self.request("/health")[1]["kv_port"]
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        try:
            super().__exit__(kind, value, at)
        finally:
            self.kill()

    def tell(self) -> None:
        """SIGTERM. A second one would end it at once, so there is no second one."""
        if not self._told and self.process.poll() is None:
            self._told = True
            self.process.terminate()

    def stop(self, number: int = signal.SIGTERM, timeout: float = 40.0) -> int:
        self.tell()
        return self.process.wait(timeout)

    def kill(self) -> None:
        """kill -9, both processes at once."""
        with suppress(psutil.NoSuchProcess):
            for pid in getattr(self, "pids", ())[::-1]:
                if psutil.Process(pid).ppid() in (self.api_pid, 1, psutil.Process().pid):
                    psutil.Process(pid).kill()
        super().kill()

    def metrics(self) -> dict[str, float]:
        """By name, without nanopd: and without those that have labels."""
        lines = self.request("/metrics")[1].splitlines()
        found = (re.fullmatch(r"nanopd:(\w+) (\S+)", line) for line in lines)
        return {match[1]: float(match[2]) for match in found if match}

    def count(self, name: str) -> int:
        """One of the metrics."""
        return int(self.metrics()[name + "_total"])

    def wait_state(self, condition: Callable[[dict[str, Any]], Any], seconds: float = 20.0) -> None:
        """Until /debug/state fulfils it."""
        wait_until(lambda: condition(self.state()), seconds)


def statuses(state: dict[str, Any], status: str) -> int:
    """How many requests are in it."""
    return sum(request["status"] == status for request in state["requests"].values())


def wait_until(condition: Callable[[], Any], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it did not come to this in {seconds} s"
        time.sleep(0.02)


@contextmanager
def running(*servers: Server) -> Iterator[None]:
    """All of them, started at the same time and waited for together."""
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.kill)
        for server in servers:
            stack.enter_context(server)
        yield
        for server in servers:
            if isinstance(server, Node):
                server.tell()  # so that they end together


# ---------------------------------------------------------------- clients


@dataclass
class Answer:
    """What a client got. `error`: an error event, or what the status says."""

    status: int = 0
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    seconds: float = 0.0
    raw: Any = None  # the decoded body, or the list of events


async def ask(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], headers: Any = None, timeout: float = 60.0
) -> Answer:
    """One completion. A stream that ends without [DONE] is an error, whether or not it says so."""
    answer, start, done = Answer(), time.monotonic(), False
    limit = aiohttp.ClientTimeout(timeout)
    try:
        async with session.post(url + COMPLETIONS, json=body, headers=headers, timeout=limit) as response:
            answer.status = response.status
            if not body.get("stream") or response.status != 200:
                answer.raw = raw = await response.json()
                if "error" in raw:
                    answer.error = raw["error"]["message"]
                else:
                    answer.text, answer.finish_reason = (raw["choices"][0][key] for key in ("text", "finish_reason"))
                return answer
            answer.raw = []
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                if done := line.strip() == b"data: [DONE]":
                    continue
                event = json.loads(line[6:])
                answer.raw.append(event)
                if "error" in event:
                    answer.error = event["error"]["message"]
                for choice in event.get("choices", ()):
                    answer.text += choice["text"]
                    answer.finish_reason = choice["finish_reason"]
            if not done and answer.error is None:
                answer.error = "the stream ended without [DONE]"
    except (aiohttp.ClientError, TimeoutError) as error:
        answer.error = repr(error)
    finally:
        answer.seconds = time.monotonic() - start
    return answer


def ask_all(
    urls: str | Sequence[str],
    jobs: Sequence[Job],
    then: Callable[[list["asyncio.Task[Answer]"]], Awaitable[None]] | None = None,
    headers: Callable[[int], dict[str, str]] = lambda i: {},
    timeout: float = 60.0,
    **options: Any,
) -> list[Answer]:
    """All jobs at once, every second one as a stream, in turn through these addresses; `then` runs meanwhile."""
    where = [urls] if isinstance(urls, str) else [url for url in urls for _ in range(2)]

    async def main() -> list[Answer]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            bodies = [job.body | {"stream": i % 2 == 1} | options for i, job in enumerate(jobs)]
            asked = [
                asyncio.create_task(ask(session, where[i % len(where)], b, headers(i), timeout))
                for i, b in enumerate(bodies)
            ]
            if then:
                await then(asked)
            await asyncio.wait(asked)
            return [Answer(error="cancelled") if task.cancelled() else task.result() for task in asked]

    return asyncio.run(main())


def check(answers: Sequence[Answer], jobs: Sequence[Job]) -> None:
    """Every token is that of one engine, and there are as many."""
    for i, (answer, job) in enumerate(zip(answers, jobs, strict=True)):
        assert answer.error is None, f"{i}: {answer}"
        same = (answer.text, answer.finish_reason) == (job.text, "length")
        assert same, f"{i}: {len(job.prompt)} tokens: {answer.text!r} ({answer.finish_reason}), not {job.text!r}"
