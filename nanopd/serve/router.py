"""The router: one OpenAI-compatible address in front of prefill nodes (P) and decode nodes (D).

A completion goes to one D, and with it to one P that computes the prompt; D fetches the KV blocks from P (lesson 11), and
its answer is passed on byte by byte. All that joins the two is `kv_transfer_params`, with an id made afresh for each try.

P6: a node that fails gets no more requests until it answers to /health again. P7: loopback unless told otherwise, an API
key, bodies bounded before they are parsed. P8: while the client has got nothing, a failure leads to another try without the
node that failed, so there is an end to it; later it leads to an error event at the end of the stream.

It knows nothing of tokens or KV blocks. What a node has in its prefix cache it guesses from what it has sent there.
"""

import asyncio
import itertools
import json
import logging
import secrets
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from nanopd.config import UserError
from nanopd.serve.config import RouterConfig

MAX_BODY, BODY_TIMEOUT = 8 * 2**20, 30.0  # bytes of a request, and seconds for them to come
NODE_TIMEOUT = 5.0  # seconds to accept a connection, or to answer to /health; for a completion there is no limit
PIECE = 64  # characters of a prompt that are remembered as one: about a KV block of 16 tokens
MAX_PIECES = 2**14  # remembered for each node: a million characters
NOT_FOR_P = ("stream_options", "min_tokens", "max_completion_tokens")  # it computes the prompt and one token
# The names are those of RouterConfig.policy: what a request in flight costs, and what a prompt saves that is there
# already: as much as four requests.
POLICIES = {"round_robin": (0.0, 0.0), "least_loaded": (1.0, 0.0), "prefix_aware": (0.25, 1.0)}

Pieces = AsyncGenerator[bytes, None]
logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Node:
    """A server: what it last said of itself, and what we know of its load and its prefix cache."""

    url: str
    health: dict[str, Any] = field(default_factory=dict)  # its last answer to /health; empty: it is down
    calls: set[asyncio.Timeout] = field(default_factory=set)  # of requests in flight: a way to end them
    last_turn: int = 0
    seen: dict[int, None] = field(default_factory=dict)  # pieces of prompts sent there, the latest at the end
    up: bool = True  # as far as the log says: that a node is up at the start is no news

    def is_now(self, health: dict[str, Any], why: str = "") -> None:
        """Takes in how it is; the log says what has changed."""
        self.health, before, self.up = health, self.up, bool(health)
        if self.up is not before:
            logger.warning(f"{self.url} is {'up again' if health else f'down and gets no requests: {why}'}")

    def plays(self, role: str) -> bool:
        return self.health.get("role") in (role, "both")

    def share_seen(self, prompt: list[int]) -> float:
        """How much of the prompt, from its beginning on, has been sent there before: 0 to 1."""
        return sum(1 for _ in itertools.takewhile(self.seen.__contains__, prompt)) / max(1, len(prompt))

    def remember(self, prompt: list[int]) -> None:
        """The end of a prompt is forgotten before its beginning, as in the block pool (K6)."""
        latest = dict.fromkeys(reversed(prompt))
        older = [piece for piece in self.seen if piece not in latest]
        self.seen = dict.fromkeys([*older, *latest][-MAX_PIECES:])


class Failed(Exception):
    """A node gave no answer, or an error; `answer` is for the client if no other node can help."""

    def __init__(self, node: Node, answer: web.Response) -> None:
        self.node, self.answer = node, answer
        if answer.status >= 500:
            logger.warning(f"a request failed at {node.url} (status {answer.status})")
        if answer.status > 500:  # 500 itself is about this request: the node may do well with others
            node.is_now({}, "it failed a request")


def error(status: int, message: str) -> web.Response:
    """In OpenAI's shape."""
    kind = "upstream_error" if status >= 500 else "invalid_request_error"
    return web.json_response({"error": {"message": message, "type": kind, "param": None, "code": None}}, status=status)


def chain(body: dict[str, Any]) -> list[int]:
    """The prompt as hashes, one for each full PIECE of its text, each over all before it as well (as K2 does for blocks).

    Two prompts have the same hashes as far as they are the same. A collision costs a detour, no more, so `hash` will do.
    """
    text = json.dumps([body.get(key) for key in ("cache_salt", "messages", "prompt")])
    pieces = (text[i : i + PIECE] for i in range(0, len(text) - PIECE + 1, PIECE))
    return list(itertools.accumulate(pieces, lambda before, piece: hash((before, piece)), initial=0))[1:]


def one_completion(body: dict[str, Any]) -> bool:
    """Whether a P can help: a transfer carries the blocks of one prompt to one completion."""
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    return bool(body) and body.get("n") in (None, 1) and not several


def transfer(body: dict[str, Any], p: Node) -> tuple[dict[str, Any], dict[str, Any]]:
    """What to send to P, and what to D, so that D fetches the prompt's blocks from P."""
    name = {"transfer_id": secrets.token_hex(16)}
    to_p = {key: value for key, value in body.items() if key not in NOT_FOR_P}
    to_p |= {"stream": False, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True} | name}
    where = {"remote_host": p.health["kv_host"], "remote_port": p.health["kv_port"]}
    return to_p, body | {"kv_transfer_params": {"do_remote_prefill": True} | where | name}


async def everything(pieces: Pieces) -> bytes:
    """All pieces as one."""
    return b"".join([piece async for piece in pieces])


class Router:
    """Chooses nodes, asks them, passes answers on."""

    def __init__(self, config: RouterConfig) -> None:
        self.config, self.turns = config, itertools.count(1)
        self.key = f"Bearer {config.api_key}" if config.api_key else ""
        self.nodes = {url: Node(url.rstrip("/")) for url in (*config.prefill, *config.decode)}  # one may be both
        self.prefill, self.decode = ([self.nodes[url] for url in urls] for urls in (config.prefill, config.decode))
        self.app = web.Application(client_max_size=MAX_BODY)
        # How requests ended, and how often a node failed one: whoever asked it again may have got a right answer.
        self.counts = dict.fromkeys(("answered", "refused", "failed", "broken_off", "client_left", "tries_failed"), 0)
        self.app.router.add_get("/health", self.health)
        self.app.router.add_get("/metrics", self.metrics)
        self.app.router.add_route("*", "/v1/{_:models|completions|chat/completions|sessions.*}", self.forward)
        self.app.cleanup_ctx.append(self.watch_all)

    # ---------------------------------------------------------------- which nodes are up

    async def watch_all(self, app: web.Application) -> AsyncGenerator[None, None]:
        """As long as the server runs, each node is looked at; the first time before the port opens."""
        timeout, headers = aiohttp.ClientTimeout(sock_connect=NODE_TIMEOUT), {"Authorization": self.key}
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, headers=headers, connector=connector) as self.session:
            await asyncio.gather(*map(self.check, self.nodes.values()))
            watching = [asyncio.create_task(self.watch(node)) for node in self.nodes.values()]
            yield
            for task in watching:
                task.cancel()

    async def watch(self, node: Node) -> None:
        while True:
            await asyncio.sleep(self.config.health_interval)
            await self.check(node)

    async def check(self, node: Node) -> None:
        """Asks a node for its health. If it does not even refuse, it has frozen or is cut off: its requests end (P8)."""
        try:
            timeout = aiohttp.ClientTimeout(NODE_TIMEOUT)
            async with self.session.get(node.url + "/health", timeout=timeout, raise_for_status=True) as response:
                node.is_now({**await response.json()})
        except (aiohttp.ClientError, TimeoutError, ValueError, TypeError) as failure:
            node.is_now({}, str(failure) or f"no answer to /health in {NODE_TIMEOUT:.0f} s")
            node.seen = {}  # when it comes back, its cache is likely empty
            while node.calls and isinstance(failure, TimeoutError):
                node.calls.pop().reschedule(0)

    async def health(self, request: web.Request) -> web.Response:
        """For those who watch the router."""
        up = any(node.health for node in self.decode)
        answer: dict[str, Any] = {"status": "ok" if up else "down"}
        for side, nodes in (("prefill", self.prefill), ("decode", self.decode)):
            answer[side] = [{"url": n.url, "up": bool(n.health), "in_flight": len(n.calls)} for n in nodes]
        return web.json_response(answer, status=200 if up else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        """For Prometheus."""
        lines = [f'nanopd:router_requests_total{{outcome="{name}"}} {n}' for name, n in self.counts.items()]
        lines += [f'nanopd:router_node_up{{url="{n.url}"}} {int(bool(n.health))}' for n in self.nodes.values()]
        return web.Response(text="\n".join([*lines, ""]))

    # ---------------------------------------------------------------- which node to take

    def choose(self, nodes: list[Node], prompt: list[int]) -> Node | None:
        """The node with the lowest cost = a * requests in flight - b * share of the prompt it has seen (a, b: POLICIES).

        Of equals, the one whose last turn is longest ago: that alone is round_robin. SGLang's router goes by the prefix
        while loads are alike, else by load; Mooncake's Conductor adds up, in seconds, what is queued at a node and what is
        left to prefill there. This is the latter, in shares of a prompt.
        """
        load, saved = POLICIES[self.config.policy]
        costs = {node: (load * len(node.calls) - saved * node.share_seen(prompt), node.last_turn) for node in nodes}
        if node := min(costs, key=costs.__getitem__, default=None):
            node.last_turn = next(self.turns)
            node.remember(prompt)
        return node

    # ---------------------------------------------------------------- a request's way

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Tries until a D has begun to answer. Each failure rules out one node, a P or a D: so this ends (P8)."""
        sent = request.headers.get("Authorization", "").encode(errors="replace")
        if self.key and not secrets.compare_digest(sent, self.key.encode()):
            return error(401, "The API key is missing or wrong; send it as a bearer token.")
        try:
            body = {**json.loads(await asyncio.wait_for(request.read(), BODY_TIMEOUT) or b"{}")}
        except (ValueError, TypeError, RecursionError, OSError, web.HTTPRequestEntityTooLarge) as problem:
            # OSError: the body came too late, or its client has gone.
            wish = f"a JSON object of at most {MAX_BODY} bytes, and come within {BODY_TIMEOUT:.0f} seconds"
            return error(getattr(problem, "status", 400), f"The body must be {wish}.")
        if request.path.startswith("/v1/sessions") or body.get("session") is not None:
            return error(400, "A session lives in one node; open it there, and send its input there.")
        body.pop("kv_transfer_params", None)  # where a D fetches from is not for clients to say
        prompt, tried, answer = chain(body), set[Node](), error(503, "No decode node is up; try again soon.")
        while d := self.choose([node for node in self.decode if node.health and node not in tried], prompt):
            able = [node for node in self.prefill if node.plays("prefill") and node not in tried | {d}]
            p = self.choose(able, prompt) if d.plays("decode") and one_completion(body) else None
            try:
                return await self.attempt(request, body, d, p)
            except Failed as failure:
                answer = failure.answer
                self.counts["tries_failed"] += 1
                if answer.status < 500 and answer.status != 429:
                    self.counts["refused"] += 1
                    return answer  # the client's mistake, and would be one everywhere
                tried.add(failure.node)
            except asyncio.CancelledError:
                self.counts["client_left"] += 1
                raise
        self.counts["failed"] += 1
        answer.headers["Retry-After"] = "1"
        return answer

    async def attempt(self, request: web.Request, body: dict[str, Any], d: Node, p: Node | None) -> web.StreamResponse:
        """One D, with a P if there is one. Until D says something, a failure of either ends both, and is raised."""
        to_d, prefill, stream = body, None, body.get("stream")
        try:
            async with asyncio.TaskGroup() as group:
                if p:
                    to_p, to_d = transfer(body, p)
                    prefill = group.create_task(everything(self.ask(p, request, to_p)))
                    if self.config.order == "prefill_first":
                        to_d = body | {"kv_transfer_params": json.loads(await prefill).get("kv_transfer_params")}
                pieces = self.ask(d, request, to_d)
                first = await (anext(pieces, b"") if stream else everything(pieces))
                if prefill:
                    prefill.cancel()  # D has what it needs from P, or does without
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return await self.pass_on(request, "text/event-stream" if stream else "application/json", first, pieces)

    async def pass_on(self, request: web.Request, kind: str, first: bytes, pieces: Pieces) -> web.StreamResponse:
        """An answer as it comes. It can no longer be begun anew: if D fails, it ends with an error and without [DONE]."""
        answer, outcome = web.StreamResponse(headers={"Content-Type": kind, "Cache-Control": "no-cache"}), "client_left"
        async with aclosing(pieces):
            with suppress(ConnectionResetError):  # the client has gone away
                await answer.prepare(request)
                await answer.write(first)
                try:
                    async for piece in pieces:
                        await answer.write(piece)
                    outcome = "answered"
                except Failed as failure:
                    outcome = "broken_off"
                    await answer.write(f"\n\ndata: {failure.answer.text}\n\n".encode())
        self.counts[outcome] += 1
        return answer

    async def ask(self, node: Node, request: web.Request, body: dict[str, Any]) -> Pieces:
        """A node's answer, as it comes. Raises Failed."""
        headers = [("X-Request-Id", value) for value in request.headers.getall("X-Request-Id", ())]
        said = body if request.method == "POST" else None
        asking = self.session.request(request.method, node.url + request.path, json=said, headers=headers)
        node.calls.add(limit := asyncio.timeout(None))
        try:
            async with limit, asking as response:
                if response.status != 200:
                    text = await response.read()
                    raise Failed(node, web.Response(status=response.status, body=text, content_type="application/json"))
                async for piece in response.content.iter_any():
                    yield piece
        except (aiohttp.ClientError, TimeoutError):
            raise Failed(node, error(503, "The node that had this request failed; try again.")) from None
        finally:
            node.calls.discard(limit)


def route(config: RouterConfig) -> int:
    """Runs a router until SIGINT or SIGTERM; the first lets requests finish, the second does not."""

    def announce(text: str) -> None:
        print("Listening on", text.split()[3], file=sys.stderr)

    async def let_signals_kill(app: web.Application) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)

    app = Router(config).app
    app.on_shutdown.append(let_signals_kill)
    options: dict[str, Any] = {"print": announce, "handler_cancellation": True, "access_log": None}
    options["shutdown_timeout"] = config.shutdown_timeout / 2  # aiohttp cancels after it, and waits for it once more
    try:
        web.run_app(app, host=config.host, port=config.port, **options)
    except OSError as failure:
        raise UserError(f"Cannot listen on {config.host}:{config.port}: {failure.strerror}.") from None
    return 0
