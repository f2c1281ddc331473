"""`nanopd pd-demo`: some prompts through a router to P and D, watched while it happens, and compared with a single node.

    client --> router --> P   computes the prompt, keeps its KV blocks
                  |       |
                  |       v   writes them into D's memory (Mooncake)
                  '-----> D   generates

The nodes are real servers in processes of their own. All that is shown comes from what any client can ask for:
/debug/state while it runs, and the `metrics` at the end of each answer. Prompts are made up here, and the same each time.
"""

import asyncio
import contextlib
import itertools
import json
import random
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
from rich.console import Console
from rich.live import Live
from rich.table import Table

from nanopd.config import EngineConfig, KVTransferConfig, UserError

from .nodes import ADDRESSES, NAMESPACES, Processes, as_options, end_like_ctrl_c, two_hosts
from .pd_view import GONE, LOADING, MARKS, RECLAIMING, RUNNING, Track, View, Watch

POLL, DRAW = 0.05, 0.1  # seconds between two looks at a node, and between two pictures
MAX_LINE = 2**20  # bytes of an event


@dataclass(frozen=True)
class Job:
    """One request to be sent."""

    name: str
    prompt: str | list[int]
    after: str | None = None  # not before this one has its first token
    max_tokens: int | None = None  # else as many as all get


@dataclass
class Answer:
    """What came back. Times are seconds since the demo's start."""

    sent: float
    first: float | None = None
    ended: float = 0.0
    text: str = ""
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def transfer(self) -> dict[str, Any]:
        """How its KV blocks came to D; empty if none did."""
        return self.metrics.get("transfer") or {}

    @property
    def decoding(self) -> float | None:
        """Tokens per second after the first."""
        latency = self.metrics.get("inter_token_latency")
        return 1 / latency if latency else None


def story(seed: int, num_chars: int) -> str:
    """A text that repeats itself nowhere."""
    chance, text = random.Random(seed), ""
    who, what = ("cook", "smith", "miller", "sailor", "nurse"), ("boats", "apples", "letters", "lamps", "horses")
    while len(text) < num_chars:
        text += f"On day {chance.randint(1, 9999)} the {chance.choice(who)} sold "
        text += f"{chance.randint(2, 99)} {chance.choice(what)}. "
    return text[:num_chars]


def make_jobs(prompt_tokens: int, chars_per_token: float) -> list[Job]:
    """One long prompt, two that begin alike, and short ones; the last is shorter than a block, which D computes itself."""

    def chars(num_tokens: int) -> int:
        return int(num_tokens * chars_per_token)

    shared = story(2, chars(prompt_tokens // 2))
    return [
        Job("long", story(1, chars(prompt_tokens))),
        Job("prefix 1", shared + story(3, chars(prompt_tokens // 8))),
        Job("short", story(4, chars(max(40, prompt_tokens // 16)))),
        Job("shorter", story(5, chars(max(20, prompt_tokens // 32)))),
        Job("tiny", "One, two"),
        Job("prefix 2", shared + story(6, chars(prompt_tokens // 8)), after="prefix 1"),
    ]


class Client:
    """Sends prompts to one address. Greedy, and to the last token, so that answers can be compared."""

    def __init__(self, session: aiohttp.ClientSession, url: str, max_tokens: int) -> None:
        self.session, self.url, self.max_tokens = session, url, max_tokens
        self.run = secrets.token_hex(3)  # part of the ids, and a salt: what an earlier run has cached is not used
        self.start = time.monotonic()
        self.answers: dict[str, Answer] = {}

    def id_of(self, job: Job) -> str:
        return f"{job.name}-{self.run}".replace(" ", "-")

    async def ask_all(self, jobs: list[Job]) -> dict[str, Answer]:
        """All at once, but for those that wait for another's first token."""
        self.start = time.monotonic()
        began = {job.name: asyncio.Event() for job in jobs}

        async def ask(job: Job) -> None:
            if job.after in began:
                await began[job.after].wait()
            answer = self.answers[job.name] = Answer(time.monotonic() - self.start)
            try:
                await self._ask(job, answer, began[job.name])
            except (aiohttp.ClientError, TimeoutError) as failure:
                answer.error = f"{type(failure).__name__}: {failure}"
            if answer.error is None and not answer.metrics:
                answer.error = "the answer ended too early"
            answer.ended = time.monotonic() - self.start
            began[job.name].set()

        await asyncio.gather(*map(ask, jobs))
        return self.answers

    async def _ask(self, job: Job, answer: Answer, began: asyncio.Event) -> None:
        body = {"prompt": job.prompt, "stream": True, "stream_options": {"include_usage": True}, "logprobs": 0}
        body |= {"temperature": 0, "max_tokens": self.max_tokens, "ignore_eos": True, "cache_salt": self.run}
        asking = self.session.post(f"{self.url}/v1/completions", json=body, headers={"X-Request-Id": self.id_of(job)})
        async with asking as response:
            if response.status != 200:
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    answer.error = (await response.json(content_type=None))["error"]["message"]
                answer.error = answer.error or f"HTTP status {response.status}"
                return
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[len(b"data: ") :])
                    if "error" in event:
                        answer.error = event["error"]["message"]
                        return
                    answer.first = answer.first or time.monotonic() - self.start
                    began.set()
                    for choice in event["choices"]:
                        answer.text += choice["text"]
                        answer.tokens += choice["logprobs"]["tokens"]
                        answer.logprobs += choice["logprobs"]["token_logprobs"]
                        answer.finish_reason = choice["finish_reason"]
                    answer.metrics = event.get("metrics") or answer.metrics
                    answer.usage = event.get("usage") or answer.usage


# ---------------------------------------------------------------- watching


async def watched(client: Client, jobs: list[Job], urls: tuple[str, str], console: Console) -> dict[str, Answer]:
    """The answers. Meanwhile both nodes are drawn, or each change is printed if nobody looks at a terminal."""
    ids = {client.id_of(job): job.name for job in jobs}
    p, d = (Watch(name, url, list(ids)) for name, url in zip("PD", urls))
    view, live = View(p, d, ids), Live(console=console, auto_refresh=False)

    async def poll(watch: Watch) -> None:
        while True:
            for id, name in ids.items():
                if name in client.answers:
                    watch.tracks[id].sent = client.answers[name].sent
            try:
                async with client.session.get(f"{watch.url}/debug/state", raise_for_status=True) as response:
                    new = watch.see(await response.json(), time.monotonic() - client.start)
            except aiohttp.ClientError:
                new = watch.lose(time.monotonic() - client.start)
            if not console.is_terminal:
                for at, id, state in sorted(new):
                    name = MARKS[state][2] if state else "gone"
                    console.print(f"{at:7.2f} s  {watch.name}  {ids[id]:9} {name}", soft_wrap=True)
            await asyncio.sleep(POLL)

    def draw() -> None:
        view.now = time.monotonic() - client.start
        for id, name in ids.items():
            if answer := client.answers.get(name):
                view.num_output[id] = len(answer.tokens)
                view.prompt_tokens[id] = answer.usage.get("prompt_tokens", 0)
                if answer.ended and answer.metrics:
                    complete(p.tracks[id], d.tracks[id], answer)
        live.update(view, refresh=True)

    async def draw_often() -> None:
        while True:
            draw()
            await asyncio.sleep(DRAW)

    with live if console.is_terminal else contextlib.nullcontext():
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(poll(watch)) for watch in (p, d)]
            tasks += [group.create_task(draw_often())] if console.is_terminal else []
            answers = await client.ask_all(jobs)
            end = time.monotonic() + 3
            while not (p.is_idle and d.is_idle) and time.monotonic() < end:
                await asyncio.sleep(POLL)
            for task in tasks:
                task.cancel()
        if console.is_terminal:
            draw()
    return answers


def complete(p: Track, d: Track, answer: Answer) -> None:
    """What D has written down replaces what was seen of it; what P did unseen is put in from D's figures."""
    history = [(at + answer.ended - answer.metrics["history"][-1][0], s) for at, s in answer.metrics["history"]]
    d.times, d.states = [at for at, _ in history], [s if s in MARKS else GONE for _, s in history]
    if (transfer := answer.transfer) and RUNNING not in p.states:
        came = next(after for (_, s), (after, _) in itertools.pairwise(history) if s == LOADING)
        computed = came - transfer["seconds"]
        p.times, p.states = [computed - transfer["prefill_seconds"], computed, came], [RUNNING, RECLAIMING, GONE]


# ---------------------------------------------------------------- what came out


def found_on_d(answers: Iterable[Answer], block_size: int) -> list[int | None]:
    """Prompt tokens that D found in its own prefix cache; None where P's blocks did not come, and D computed them.

    D counts what it found and what comes as one. But it fetches only what it has not: so we see it from the bytes. How
    many a block has, we learn from the prompt of which all blocks came.
    """
    answers = list(answers)
    num_blocks = [-(-answer.usage.get("prompt_tokens", 0) // block_size) for answer in answers]
    block_bytes = max((a.transfer["num_bytes"] / n for a, n in zip(answers, num_blocks) if a.transfer), default=1.0)
    found: list[int | None] = []
    for answer, n in zip(answers, num_blocks):
        if answer.transfer:
            found.append(max(0, n - round(answer.transfer["num_bytes"] / block_bytes)) * block_size)
        elif any(status == LOADING for _, status in answer.metrics.get("history", ())):
            found.append(None)
        else:
            found.append(answer.usage.get("prompt_tokens_details", {}).get("cached_tokens"))
    return found


def figures(job: Job, answer: Answer, single: Answer, found: int | None) -> dict[str, Any]:
    """One row of the table."""
    row: dict[str, Any] = {"id": job.name, "error": answer.error or single.error}
    if row["error"]:
        return row | {"equal": False}
    transfer, usage = answer.transfer, answer.usage
    differences = [abs(a - b) for a, b in zip(answer.logprobs, single.logprobs)]
    return row | {
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "prefill_seconds": transfer.get("prefill_seconds"),
        "kv_bytes": int(transfer.get("num_bytes", 0)),
        "kv_pieces": int(transfer.get("num_pieces", 0)),
        "transfer_seconds": transfer.get("seconds"),
        "transfer_gib_per_s": transfer["num_bytes"] / transfer["seconds"] / 2**30 if transfer else None,
        "cached_on_d": found,
        "time_to_first_token": (answer.first or 0.0) - answer.sent,
        "output_tokens_per_s": answer.decoding,
        "single_node": {
            "time_to_first_token": (single.first or 0.0) - single.sent,
            "output_tokens_per_s": single.decoding,
        },
        "equal": (answer.text, answer.tokens) == (single.text, single.tokens),
        "max_logprob_difference": max(differences, default=0.0),
        "tokens": answer.tokens,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "metrics": answer.metrics,
    }


def print_table(rows: list[dict[str, Any]], console: Console) -> None:
    """For people."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("request", no_wrap=True)
    heads = "prompt tokens", "prefill ms", "KV MiB", "KV pieces", "transfer ms", "GiB/s", "found on D", "TTFT ms"
    for head in (*heads, "decode tok/s", "equal"):
        table.add_column(head.replace(" ", "\n", 1), justify="right")

    def show(value: float | None, scale: float = 1.0, digits: int = 0) -> str:
        return f"{value * scale:.{digits}f}" if value else "-"

    for row in rows:
        if row["error"]:
            table.add_row(row["id"], *[""] * len(heads), "", "[red]error")
            continue
        cells = [show(row["prompt_tokens"]), show(row["prefill_seconds"], 1e3), show(row["kv_bytes"], 2**-20, 1)]
        cells += [show(row["kv_pieces"]), show(row["transfer_seconds"], 1e3, 1), show(row["transfer_gib_per_s"], 1, 2)]
        cells += ["?" if row["cached_on_d"] is None else str(row["cached_on_d"]), show(row["time_to_first_token"], 1e3)]
        cells += [show(row["output_tokens_per_s"], 1, 1), "[green]yes" if row["equal"] else "[red]no"]
        table.add_row(row["id"], *cells)
    console.print(table)
    for row in rows:
        if row["error"]:
            console.print(f"{row['id']}: {row['error']}", style="red", markup=False)


# ---------------------------------------------------------------- the demo


@dataclass(frozen=True)
class Options:
    """What the user asked for, see commands.py."""

    engine: EngineConfig
    prompt_tokens: int
    max_tokens: int
    kv_push: str
    hosts: str | None
    netns: bool
    api_key: str | None
    as_json: bool

    def __post_init__(self) -> None:
        KVTransferConfig(kv_push=self.kv_push)  # raises UserError
        if self.hosts is not None and self.netns:
            raise UserError("--hosts and --netns exclude each other.")
        if self.api_key is not None and self.hosts is None:
            raise UserError("--api-key goes with --hosts.")


def demo_engine(options: Options) -> EngineConfig:
    """The engine options, with the demo's own defaults."""
    given = options.engine
    room = max(256, 4 * (options.prompt_tokens + options.max_tokens) // given.block_size)  # for all prompts at once
    return replace(
        given,
        dtype="float32" if given.dtype == "auto" else given.dtype,
        num_blocks=given.num_blocks or (None if given.kv_cache_memory else room),
        long_prefill_token_threshold=given.long_prefill_token_threshold or 256,
    )


async def start_nodes(processes: Processes, options: Options) -> tuple[str, str]:
    """P and D on this machine, on free ports. Returns their addresses."""
    nodes = []
    for name, role in (("P", "prefill"), ("D", "decode")):
        address, netns = (ADDRESSES[name], NAMESPACES[name]) if options.netns else ("127.0.0.1", None)
        where = [f"--host={address}", "--port=0", f"--kv-host={address}", "--kv-port=0", "--shutdown-timeout=1"]
        what = [f"--role={role}", f"--kv-push={options.kv_push}", *as_options(demo_engine(options))]
        nodes.append(processes.start(name, "serve", *what, *where, netns=netns))
    await processes.wait("Ready.", *nodes)
    return nodes[0].url, nodes[1].url


async def start_router(processes: Processes, p: str, d: str, api_key: str | None) -> str:
    """Returns its address."""
    key = [f"--api-key={api_key}"] if api_key else []
    router = processes.start("router", "route", f"--prefill={p}", f"--decode={d}", "--port=0", *key)
    await processes.wait("Listening on ", router)
    return router.url


async def find_nodes(session: aiohttp.ClientSession, hosts: str) -> list[str]:
    """The addresses in --hosts, if what is there is what should be. Raises UserError."""
    urls = [url.strip().rstrip("/") for url in hosts.split(",")]
    if len(urls) not in (2, 3) or not all(url.startswith(("http://", "https://")) for url in urls):
        raise UserError(f"--hosts is {hosts!r}; it must be P_URL,D_URL or P_URL,D_URL,ROUTER_URL, each with http://.")
    for url, role in zip(urls, ("prefill", "decode", None)):
        try:
            async with session.get(f"{url}/health", timeout=aiohttp.ClientTimeout(10)) as response:
                health = {**await response.json()}
        except (aiohttp.ClientError, TimeoutError, ValueError, TypeError) as failure:
            raise UserError(f"No node of nanopd answers at {url} ({str(failure) or 'timeout'}).") from None
        if health.get("status") != "ok":
            raise UserError(f"The node at {url} is not ready; it is {health.get('status')}.")
        if role and health.get("role") not in (role, "both"):
            raise UserError(f"{url} is no {role} node, its role is {health.get('role')}; --hosts takes P, then D.")
    return urls


async def make_jobs_for(session: aiohttp.ClientSession, url: str, options: Options) -> list[Job]:
    """The prompts, in the lengths wanted; a first request, which warms up, tells how long a token is."""
    sample = Job("warm-up", story(0, 120))
    answer = (await Client(session, url, 2).ask_all([sample]))[sample.name]
    if answer.error:
        raise UserError(f"The first request failed: {answer.error}")
    return make_jobs(options.prompt_tokens, len(sample.prompt) / answer.usage["prompt_tokens"])


async def demo(options: Options, console: Console) -> list[dict[str, Any]]:
    """All of it. Returns the rows of the table."""
    limits: dict[str, Any] = {"timeout": aiohttp.ClientTimeout(sock_connect=10), "read_bufsize": MAX_LINE}
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else None
    with two_hosts() if options.netns else contextlib.nullcontext(), Processes(console) as processes:
        async with aiohttp.ClientSession(headers=headers, **limits) as session:
            p, d, *router = (
                await find_nodes(session, options.hosts) if options.hosts else await start_nodes(processes, options)
            )
            router = router or [await start_router(processes, p, d, options.api_key)]
            jobs = await make_jobs_for(session, router[0], options)
            console.print(f"{len(jobs)} prompts to the router at {router[0]}:")
            answers = await watched(Client(session, router[0], options.max_tokens), jobs, (p, d), console)
            for process in processes.dead():
                console.print(f"{process.name} has died. The end of its log:\n{process.end_of_log()}", markup=False)
            answered, single, singles = [job for job in jobs if not answers[job.name].error], d, dict[str, Answer]()
            if answered and not options.hosts:
                processes.stop()  # first: a small machine is not to hold three models
                node = processes.start("single node", "serve", "--port=0", *as_options(demo_engine(options)))
                await processes.wait("Ready.", node)
                single = node.url
            with console.status("the same prompts on a single node …"):
                singles = await Client(session, single, options.max_tokens).ask_all(answered)
    found = found_on_d((answers[job.name] for job in jobs), options.engine.block_size)
    return [
        figures(job, answers[job.name], singles.get(job.name, Answer(0.0)), tokens) for job, tokens in zip(jobs, found)
    ]


def run(options: Options) -> int:
    """The command. Returns the exit code: 0 if P's blocks have come and all answers are those of a single node, else 1."""
    console = Console(stderr=options.as_json, highlight=False)
    end_like_ctrl_c()
    rows = asyncio.run(demo(options, console))
    names = "prompt_tokens", "completion_tokens", "kv_bytes", "kv_pieces"
    summary: dict[str, Any] = {name: sum(row.get(name, 0) for row in rows) for name in names}
    summary["equal"] = equal = all(row["equal"] for row in rows)
    summary["max_logprob_difference"] = max(row.get("max_logprob_difference", 0.0) for row in rows)
    if options.as_json:
        for row in (*rows, {"requests": len(rows)} | summary):
            print(json.dumps(row))
    else:
        print_table(rows, console)
        note = " (that is D, asked without P)" if options.hosts else ""
        if summary["kv_bytes"]:
            console.print(f"KV moved from P to D: {summary['kv_bytes'] / 2**20:.1f} MiB")
        else:
            console.print("Nothing has come from P to D.", style="red")
        failed = sum(bool(row["error"]) for row in rows)
        verdict = "yes" if equal else f"no, {failed} requests failed" if failed else "no"
        console.print(f"tokens equal to a single node: {verdict}{note}", style="bold")
    return 0 if equal and summary["kv_bytes"] else 1
