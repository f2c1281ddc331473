"""The HTTP server: OpenAI's completions and chat completions, and what operators ask for.

    POST /v1/completions, /v1/chat/completions     GET /v1/models, /health, /metrics, /debug/state
    POST /v1/sessions, DELETE /v1/sessions/ID

A request is checked, tokenized in a thread, and handed to the engine core's process (engine/process.py). One task takes
in what comes back: outputs grow, and each client's handler is woken and writes what is new since its last write. So a
client that reads slowly gets fewer and larger chunks, and delays nobody.

An answer is right, or soon an error in OpenAI's form (rule P8). A client that goes away takes its request with it (P5).
Bodies are bounded before they are parsed, and a key guards everything but /health (P7). What we do not have is refused by
name rather than ignored. This file knows nothing about scheduling or tensors.
"""

import asyncio
import hmac
import logging
import os
import signal
import sys
import time
import uuid
import weakref
from collections import deque
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from nanopd.config import EngineConfig, KVTransferConfig, SamplingParams, UserError
from nanopd.connector.protocol import KVTransferParams
from nanopd.engine.llm import CompletionOutput, EngineInfo, Frontend, Logprob, Prompt, RequestOutput
from nanopd.engine.process import EngineClient, Inspect, Outputs, State
from nanopd.serve.config import ServeConfig
from nanopd.serve.metrics import Metrics

MAX_BODY = 8 * 2**20  # bytes
READ_TIMEOUT, WRITE_TIMEOUT = 30.0, 60.0  # seconds for a body to come, and for a client to take a chunk
_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_SAMPLING = SamplingParams.__dataclass_fields__.keys()
_IGNORED = {"user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key"}
# What would change the answer, and is not here; and the values with which it asks for nothing.
_UNSUPPORTED = ["tools", "tool_choice", "functions", "function_call", "logit_bias", "modalities"]
_UNSUPPORTED += ["suffix", "echo", "best_of"]
_NOTHING: tuple[Any, ...] = ([], {}, "", False, "none", "auto", ["text"])


class ApiError(Exception):
    """An answer that is no success, in OpenAI's form."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        kind = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        error = {"message": message, "type": kind.get(status, "invalid_request_error"), "param": param, "code": code}
        self.status, self.body = status, {"error": error}


# ---------------------------------------------------------------- what is asked


class Part(msgspec.Struct, tag_field="type", tag="text"):
    """A piece of a message. Only text is known."""

    text: str


class Message(msgspec.Struct):
    """One message of a chat."""

    role: str
    content: str | list[Part]

    def __post_init__(self) -> None:
        if not isinstance(self.content, str):
            self.content = "".join(part.text for part in self.content)


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """A request, without its sampling options."""

    prompt: str | list[Any] = ""
    messages: list[Message] = []
    model: str | None = None
    stream: bool = False
    stream_options: dict[str, bool] = {}
    return_token_ids: bool = False  # vLLM's: the ids of prompt and answer, beside the text
    cache_salt: str | None = None
    priority: int = 0  # vLLM's: lower is more urgent
    session: str | None = None  # ours: the prompt is further input of this one
    kv_transfer_params: KVTransferParams = KVTransferParams()


def parse(raw: bytes, chat: bool) -> tuple[Body, dict[str, Any]]:
    """What a request holds, and its fields of SamplingParams. Raises msgspec.DecodeError or ApiError."""
    given = msgspec.json.decode(raw, type=dict[str, Any])
    given = {name: value for name, value in given.items() if value is not None and name not in _IGNORED}
    if given.get("best_of") == given.get("n", 1):
        del given["best_of"]
    for name in _UNSUPPORTED:
        if given.pop(name, False) not in _NOTHING:
            raise ApiError(400, f"{name} is not supported.", "unsupported", name)
    if ("messages" in given, "prompt" in given) != (chat, not chat):
        raise ApiError(400, "A chat completion needs messages, a completion a prompt; and not the other.")
    if "max_completion_tokens" in given:
        given["max_tokens"] = given.pop("max_completion_tokens")
    if chat:
        top, wanted = given.pop("top_logprobs", 0), given.pop("logprobs", False)
        if not isinstance(wanted, bool) or (top and not wanted):
            raise ApiError(400, "logprobs must be true or false, and true with top_logprobs.", param="logprobs")
        given |= {"logprobs": top} if wanted else {}
    if {"response_format", "structured_outputs"} <= given.keys():
        raise ApiError(400, "Give response_format or structured_outputs, not both.", param="response_format")
    match given.pop("response_format", {"type": "text"}):
        case {"type": "text"}:
            pass
        case {"type": "json_object"}:
            given["structured_outputs"] = {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            given["structured_outputs"] = {"json": schema}
        case other:
            wanted = "type text, json_object, or json_schema with a json_schema that has a schema"
            raise ApiError(400, f"response_format is {other}; it must have {wanted}.", param="response_format")
    sampling = {name: given.pop(name) for name in _SAMPLING & given.keys()}
    body = msgspec.convert(given, Body)
    if body.kv_transfer_params.do_remote_decode:
        sampling.pop("min_tokens", None)  # Mooncake's proxy leaves it in when it asks a prefill node for one token
        sampling.pop("structured_outputs", None)  # and that token is thrown away
    return body, sampling


# ---------------------------------------------------------------- what is answered


class Answer:
    """All that goes to one client: the outputs of its prompts while they grow, and how much of them it has."""

    def __init__(self, id: str, model: str, chat: bool, body: Body, num_top: int | None) -> None:
        stream, self.return_token_ids = body.stream, body.return_token_ids
        kind = "text_completion" if not chat else "chat.completion.chunk" if stream else "chat.completion"
        self.frame = {"id": id, "object": kind, "created": int(time.time()), "model": model}
        self.chat, self.text_key, self.num_top = chat, "delta" if stream else "message", num_top or 0
        self.outputs: list[RequestOutput] = []
        self.completions: list[CompletionOutput] = []  # of all outputs
        self.sent: dict[int, tuple[int, int]] = {}  # of those not sent to the end: characters, tokens
        self.changed = asyncio.Event()

    def add(self, output: RequestOutput) -> None:
        """One prompt more; choices are numbered prompt by prompt."""
        self.outputs.append(output)
        self.completions += output.outputs
        self.sent = dict.fromkeys(range(len(self.completions)), (0, 0))

    def news(self) -> dict[str, Any]:
        """What the client does not have yet; empty `choices` if there is nothing. Raises ApiError if one has failed."""
        news: dict[str, Any] = self.frame | {"choices": []}
        for index, (num_chars, since) in self.sent.items():
            c = self.completions[index]
            if c.finish_reason == "error":
                why = str(c.stop_reason)
                code = "bad_grammar" if why.startswith("structured_outputs:") else None
                mistake = code or why.startswith("The prompt has")  # too many tokens, when its turn in a session came
                raise ApiError(400, why, code) if mistake else ApiError(503, why, "engine_error")
            if c.finish_reason is None and len(c.text) == num_chars:
                continue
            self.sent[index] = len(c.text), len(c.token_ids)
            choice: dict[str, Any] = {"index": index, "finish_reason": c.finish_reason, "stop_reason": c.stop_reason}
            choice["logprobs"] = None if c.logprobs is None else self._logprobs(c, since)
            message = {"content": c.text[num_chars:]} | ({} if since else {"role": "assistant"})
            choice |= {self.text_key: message} if self.chat else {"text": c.text[num_chars:]}
            choice |= {"token_ids": c.token_ids[since:]} if self.return_token_ids else {}
            news["choices"].append(choice)
        self.sent = {i: sent for i, sent in self.sent.items() if self.completions[i].finish_reason is None}
        if news["choices"] and not self.sent:
            first = self.outputs[0]
            news["metrics"] = first.metrics.as_dict(len(first.outputs[0].token_ids))
            news |= {"prompt_token_ids": first.prompt_token_ids} if self.return_token_ids else {}
            news |= {"kv_transfer_params": first.kv_transfer_params} if first.kv_transfer_params else {}
        return news

    def _logprobs(self, c: CompletionOutput, since: int) -> dict[str, Any]:
        """From token `since` on, in the shape of one endpoint or the other."""
        tops = c.logprobs or []
        chosen = [top[token_id] for token_id, top in zip(c.token_ids, tops)]
        if self.chat:
            pairs = list(zip(chosen, tops))[since:]
            ranked = [[_show(p) for p in top.values() if p.rank <= self.num_top] for _, top in pairs]
            return {"content": [_show(p) | {"top_logprobs": top} for (p, _), top in zip(pairs, ranked)]}
        return {
            "tokens": [p.decoded_token for p in chosen[since:]],
            "token_logprobs": [p.logprob for p in chosen[since:]],
            "top_logprobs": [{p.decoded_token: p.logprob for p in top.values()} for top in tops[since:]],
            "text_offset": list(accumulate((len(p.decoded_token) for p in chosen), initial=0))[since:-1],
        }

    def usage(self) -> dict[str, Any]:
        """Of all prompts and completions."""
        prompt = sum(output.metrics.num_prompt_tokens for output in self.outputs)
        cached = sum(output.metrics.num_cached_tokens for output in self.outputs)
        answer = sum(len(completion.token_ids) for completion in self.completions)
        counts = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
        return {"usage": counts | {"prompt_tokens_details": {"cached_tokens": cached}}}


def _show(p: Logprob) -> dict[str, Any]:
    bytes = None if "\ufffd" in p.decoded_token else list(p.decoded_token.encode())  # None: a part of a character
    return {"token": p.decoded_token, "logprob": p.logprob, "bytes": bytes}


# ---------------------------------------------------------------- the server


class Server:
    """One engine and its clients, from start to end."""

    def __init__(self, engine: EngineConfig, kv_transfer: KVTransferConfig, config: ServeConfig) -> None:
        self.engine, self.kv_transfer, self.config = engine, kv_transfer, config
        self.client, self.metrics = EngineClient(), Metrics()
        self.status, self.model = "starting", ""  # then "ok", and at the end "draining"
        self.num_unfinished = 0  # completions, asked for and not answered yet
        self.in_order = weakref.WeakValueDictionary[str, asyncio.Lock]()  # by session: one input is tokenized at a time
        self.answers: dict[RequestOutput, Answer] = {}  # whom to wake
        self.recent_ids: deque[str] = deque(maxlen=4096)
        self.inspections: deque[asyncio.Future[dict[str, Any]]] = deque()

    async def run(self) -> int:
        """Serves until a signal comes or the engine dies. Returns the exit code."""
        stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_signal() -> None:
            if stopped.done():  # the second one: at once
                self.client.kill()
                os._exit(130)
            stopped.set_result(None)

        app = web.Application(middlewares=[self.guard], client_max_size=MAX_BODY)
        app.on_response_prepare.append(_send_id)
        app.add_routes([web.get("/v1/models", self.models), web.get("/health", self.health)])
        app.add_routes([web.get("/metrics", self.numbers), web.get("/debug/state", self.state)])
        app.add_routes([web.post(path, self.complete) for path in (_COMPLETIONS, _CHAT)])
        app.add_routes([web.post("/v1/sessions", self.open), web.delete("/v1/sessions/{id}", self.close)])
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=2.0)
        await runner.setup()
        await web.TCPSite(runner, self.config.host, self.config.port).start()
        print(f"Listening on http://{self.config.host}:{runner.addresses[0][1]}", file=sys.stderr, flush=True)
        await self.client.start(self.engine, self.kv_transfer)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, on_signal)
        receiving, died = asyncio.create_task(self._receive()), self.client.died
        try:
            ends: list[asyncio.Future[Any]] = [receiving, stopped, died]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            self.status = "draining"
            end = time.monotonic() + self.config.shutdown_timeout
            while self.num_unfinished and time.monotonic() < end and not (receiving.done() or died.done()):
                await asyncio.sleep(0.02)
            if self.answers:
                ids = [output.request_id for output in self.answers]
                self.frontend.abort_requests(ids, "error", "The server ends, or its engine core has died.")
                self._wake(self.answers)
            if receiving.done():
                receiving.result()  # raises: it ends in no other way
            if stopped.done() or died.result() == 2:  # it has said itself what the user's mistake is
                return 0 if stopped.done() else 2
            print(f"Error: the engine core has died (exit code {died.result()}).", file=sys.stderr)
            return 3
        finally:
            await runner.cleanup()  # open answers get their last words
            receiving.cancel()
            await self.client.stop(grace=5.0 if self.model else 0.0)  # as long as it has no model it does not listen

    async def _receive(self) -> None:
        """Takes in what the engine core says."""
        while True:
            match await self.client.receive():
                case EngineInfo() as info:
                    self.client.directory.cleanup()  # here, so that nothing is left behind if we are killed
                    self.info, name = info, Path(self.engine.model or info.model_path).resolve().name
                    self.frontend = await asyncio.to_thread(Frontend, self.client, info, self.engine.seed)
                    self.model, self.status = self.config.served_model_name or name, "ok"
                    print("Ready.", file=sys.stderr, flush=True)
                case Outputs(outputs, scheduler, transfer):
                    self.metrics.scheduler, self.metrics.transfer = scheduler, transfer or self.metrics.transfer
                    if outputs:
                        self._wake(self.frontend.process_outputs(outputs))
                case State(state):
                    self.inspections.popleft().set_result(state)

    def _wake(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            self.answers[output].changed.set()

    def _check_ready(self) -> None:
        if self.status != "ok":
            raise ApiError(503, f"The server is {self.status}.", self.status)

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Gives a request its id, asks for the key, refuses it while the server is not ready, and puts what goes wrong into
        OpenAI's form."""
        id = request["id"] = request.headers.get("X-Request-Id") or str(uuid.uuid4())
        key, sent = f"Bearer {self.config.api_key}", request.headers.get("Authorization", "")
        try:
            if len(id) > 200 or not (id.isascii() and id.isprintable()):
                request["id"] = str(uuid.uuid4())
                raise ApiError(400, "X-Request-Id must be at most 200 printable ASCII characters.")
            guarded = self.config.api_key is not None and request.path != "/health"
            if guarded and not hmac.compare_digest(sent.encode(errors="replace"), key.encode()):
                raise ApiError(401, "Send the API key: Authorization: Bearer KEY.", "invalid_api_key")
            if request.path not in ("/health", "/metrics"):
                self._check_ready()
            if self.status == "ok":
                self.frontend.end_idle_sessions(self.config.session_timeout)
            return await handler(request)
        except ApiError as error:
            failure = error
        except web.HTTPException as error:
            failure = ApiError(error.status, f"{request.method} {request.path}: {error.reason}.")
        except TimeoutError:
            failure = ApiError(408, f"The body did not come within {READ_TIMEOUT:.0f} seconds.")
        except (UserError, msgspec.DecodeError, RecursionError, web.RequestPayloadError, ConnectionError) as error:
            failure = ApiError(400, str(error))
        except Exception:
            logging.getLogger(__name__).exception(f"{request.path} failed; please report it with the text below")
            failure = ApiError(500, "Internal error; the server's log says more.")
        headers = {"Retry-After": "1"} if failure.status == 429 else None
        return web.json_response(failure.body, status=failure.status, headers=headers)

    # ---------------------------------------------------------------- completions

    async def complete(self, http: web.Request) -> web.StreamResponse:
        """Both kinds of completions."""
        chat = http.path == _CHAT
        body, sampling = parse(await asyncio.wait_for(http.read(), READ_TIMEOUT), chat)
        if body.model not in (None, self.model):
            raise ApiError(404, f"There is no model {body.model!r}, only {self.model!r}.", "model_not_found", "model")
        params = SamplingParams(**({"max_tokens": self.info.max_model_len} if chat else {}) | sampling)
        several = isinstance(body.prompt, list) and body.prompt and isinstance(body.prompt[0], (str, list))
        prompts: Any = body.prompt if several else [body.prompt]
        transfer = self._check_transfer(body, http["id"], len(prompts))
        if body.session is not None:
            self._check_session(body.session)
            if chat or len(prompts) > 1:
                raise ApiError(400, "Input of a session is one prompt, for /v1/completions.", param="session")
        count, most = params.n * len(prompts), self.engine.max_num_seqs + self.config.max_waiting
        if self.num_unfinished + count > most:
            status = 429 if count <= most else 400
            raise ApiError(status, f"{count} completions on top of {self.num_unfinished}: the limit is {most}.", "busy")
        id = f"{'chatcmpl' if chat else 'cmpl'}-{http['id']}"
        answer = Answer(id, self.model, chat, body, params.logprobs)
        self.num_unfinished += count
        try:
            alone = asyncio.Lock()
            async with alone if body.session is None else self.in_order.setdefault(body.session, alone):
                tokenized = await asyncio.to_thread(self._encode, prompts, body)
                self._check_ready()
                for i, prompt in enumerate(tokenized):
                    name = http["id"] if len(prompts) == 1 else f"{http['id']}-{i}"
                    about = self._unused(name) if body.session is None else None, transfer, body.priority, body.session
                    answer.add(output := self.frontend.add_request(prompt, params, *about))
                    self.answers[output] = answer
            if body.stream:
                return await self._stream(http, answer, body.stream_options.get("include_usage", False))
            while not all(output.finished for output in answer.outputs):
                await answer.changed.wait()
                answer.changed.clear()
            return web.json_response(answer.news() | answer.usage())
        finally:
            self.num_unfinished -= count
            self.frontend.abort_outputs(answer.outputs)
            for output in answer.outputs:
                del self.answers[output]
                self.metrics.observe(output)

    def _check_transfer(self, body: Body, request_id: str, num_prompts: int) -> KVTransferParams | None:
        """What the request says about P/D, if the server's role allows it. Without a transfer id it is the request's."""
        params = body.kv_transfer_params
        if not params.do_remote_decode and not params.do_remote_prefill:
            return None
        wish, of = ("do_remote_decode", "prefill") if params.do_remote_decode else ("do_remote_prefill", "decode")
        if self.kv_transfer.role not in (of, "both") or num_prompts > 1:
            raise ApiError(400, f"{wish} needs --role {of} or both, and one prompt.", param="kv_transfer_params")
        return msgspec.structs.replace(params, transfer_id=params.transfer_id or request_id)

    def _encode(self, prompts: list[Any], body: Body) -> list[Prompt]:
        """Prompts as token ids. In a thread: a long text takes a while."""
        tokenizer = self.frontend.tokenizer
        if body.messages:
            prompts = [tokenizer.apply_chat_template(msgspec.to_builtins(body.messages))]
        ids = (self.frontend.encode(p, body.session) if isinstance(p, str) else p for p in prompts)
        return [{"prompt_token_ids": i, "cache_salt": body.cache_salt} for i in ids]

    def _unused(self, request_id: str) -> str:
        """The id, changed if it was used not long ago: that request may run, hold blocks, or have news under way."""
        if request_id in self.recent_ids:
            request_id += f"-{uuid.uuid4().hex[:8]}"
        self.recent_ids.append(request_id)
        return request_id

    async def _stream(self, http: web.Request, answer: Answer, include_usage: bool) -> web.StreamResponse:
        """Server-sent events. They begin with the first news: what fails before still gets a status of its own."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})

        async def write(event: dict[str, Any] | None) -> None:
            data = b"[DONE]" if event is None else msgspec.json.encode(event)
            try:
                await asyncio.wait_for(response.write(b"data: " + data + b"\n\n"), WRITE_TIMEOUT)
            except (ConnectionError, TimeoutError):  # the client is gone, or takes nothing: this cancels the handler
                if http.transport:
                    http.transport.abort()

        try:
            while answer.sent:
                await answer.changed.wait()
                answer.changed.clear()
                news = answer.news()
                if news["choices"]:
                    if not response.prepared:
                        await response.prepare(http)
                    await write(news | ({"usage": None} if include_usage else {}))
            if include_usage:
                await write(answer.news() | answer.usage())
            await write(None)
        except ApiError as error:
            if not response.prepared:
                raise
            await write(error.body)
        return response

    # ---------------------------------------------------------------- sessions

    async def open(self, http: web.Request) -> web.Response:
        """A request that gets its input piece by piece, from completions with its id as `session` (rule S13)."""
        if (await asyncio.wait_for(http.read(), READ_TIMEOUT)).strip() not in (b"", b"{}"):
            raise ApiError(400, "A session has no options; leave the body empty.")
        most = self.engine.max_num_seqs + self.config.max_waiting
        if len(self.frontend.sessions) >= most:
            raise ApiError(429, f"{most} sessions are open: that is the limit. End one, or try later.", "busy")
        id = self.frontend.open_session(self._unused(http["id"]))
        return web.json_response({"id": id, "object": "session", "timeout": self.config.session_timeout}, status=201)

    async def close(self, http: web.Request) -> web.Response:
        """Ends a session, and what is still answered in it."""
        self._check_session(id := http.match_info["id"])
        self.frontend.abort_requests([id], why="The session has been ended.")
        self._wake(output for output in self.answers if output.request_id == id)
        return web.json_response({"id": id, "object": "session", "deleted": True})

    def _check_session(self, id: str) -> None:
        if id not in self.frontend.sessions:
            advice = "it may have ended. Open another one."
            raise ApiError(404, f"There is no session {id[:200]!r}; {advice}", "session_not_found", "session")

    # ---------------------------------------------------------------- what operators ask for

    async def models(self, http: web.Request) -> web.Response:
        """The one model there is."""
        card = {"id": self.model, "object": "model", "created": 0, "owned_by": "nanopd"}
        return web.json_response({"object": "list", "data": [card | {"max_model_len": self.info.max_model_len}]})

    async def health(self, http: web.Request) -> web.Response:
        """For load balancers and the router; the only page that needs no key."""
        if self.status != "ok":
            return web.json_response({"status": self.status}, status=503)
        s, role = self.metrics.scheduler, self.kv_transfer.role
        state: dict[str, Any] = {"status": "ok", "role": role, "model": self.model, "num_running": s.num_running}
        state |= {"num_waiting": s.num_waiting, "kv_host": self.kv_transfer.kv_host if role else None}
        return web.json_response(state | {"kv_port": self.info.kv_port})

    async def numbers(self, http: web.Request) -> web.Response:
        """For Prometheus."""
        return web.Response(body=self.metrics.text(), content_type="text/plain", charset="utf-8")

    async def state(self, http: web.Request) -> web.Response:
        """What the scheduler holds, as the engine core itself sees it."""
        self.inspections.append(answer := asyncio.get_running_loop().create_future())
        self.client.send(Inspect())
        return web.json_response(await asyncio.shield(answer))


async def _send_id(http: web.Request, response: web.StreamResponse) -> None:
    response.headers["X-Request-Id"] = http["id"]


def serve(engine: EngineConfig, kv_transfer: KVTransferConfig, server: ServeConfig) -> int:
    """Runs a server until it is told to stop. Returns the exit code: 0, 2 for a mistake of the user's, 3 if it fails."""
    return asyncio.run(Server(engine, kv_transfer, server).run())
