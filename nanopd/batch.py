"""Requests from the command line or a file: read lazily, answered as they finish, safe to interrupt and to resume.

One input line is one request; what is wrong with a line is said with its number, and the others go on. An answer is
written and flushed the moment its request has finished, so Ctrl-C (or a power cut) loses only what was still running.
"""

import contextlib
import dataclasses
import itertools
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from nanopd.config import SamplingParams, UserError, require

if TYPE_CHECKING:
    from nanopd.engine.llm import LLM, RequestOutput

_PROMPTS = ("prompt", "messages", "prompt_token_ids")
_Messages = Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]


def stdin() -> TextIO:
    """Standard input. Raises UserError if whoever started us has closed it."""
    require(sys.stdin is not None, "Standard input is needed here, and it is closed.")
    if sys.stdin.isatty():
        print("(Ctrl-D ends the input)", file=sys.stderr)
    return sys.stdin


def run_prompts(
    load: Callable[[], "LLM"], sampling: SamplingParams, prompts: list[str] | None, as_chat: bool, as_json: bool
) -> int:
    """Prompts from the command line, or one from stdin; a single answer is shown as it comes. Returns the exit code."""
    texts = prompts or [stdin().read()]
    todo = [{"messages": [{"role": "user", "content": text}]} if as_chat else {"prompt": text} for text in texts]
    llm = load()
    if len(todo) == sampling.n == 1 and not as_json:
        return 130 if stream(llm, add(llm, sampling, todo[0])) is None else 0
    lines = [json.dumps({"id": i} | fields).encode() for i, fields in enumerate(todo)]
    return _run(llm, sampling, lines, [sys.stdout] if as_json else [], len(lines), set())


def run_file(
    load: Callable[[], "LLM"], sampling: SamplingParams, input: Path, output: Path | None, resume: bool, as_json: bool
) -> int:
    """Requests from a file (`-`: stdin) to a file (None: stdout). Returns the exit code."""
    with contextlib.ExitStack() as stack:
        source = stdin().buffer if str(input) == "-" else stack.enter_context(input.open("rb"))
        total, done = None, set[str]()
        if output is not None and output.is_file() and output.stat().st_size:
            require(not input.exists() or not output.samefile(input), "--input and --output are the same file.")
            require(resume, f"--output {output} exists; add --resume to go on with it, or choose another name.")
            done = _drop_unfinished(output.resolve())
        if source.seekable():
            total = sum(1 for line in source if line.strip()) - len(done)
            source.seek(0)
        llm = load()
        sinks = [sys.stdout] if as_json or output is None else []
        if output is not None:
            sinks.append(stack.enter_context(output.open("a", encoding="utf-8")))
        return _run(llm, sampling, source, sinks, total, done)


def _drop_unfinished(output: Path) -> set[str]:
    """Ids already answered. Rows with an error, and a last line cut short, leave the file, to be tried again.

    Raises UserError, and touches nothing, if the file holds anything that we did not write.
    """
    kept: dict[str, bytes] = {}
    *lines, last = output.read_bytes().split(b"\n")
    ours = b'{"id": '.startswith(last[:7])  # empty, or cut short
    for raw in lines:
        try:
            row = msgspec.json.decode(raw)
            if "error" not in row and row["finish_reason"]:
                kept[row["id"]] = raw
        except (msgspec.DecodeError, KeyError, TypeError):
            ours = False
    require(ours, f"--output {output} holds lines that are no answers of nanopd; choose another file.")
    rest = output.with_name(f"{output.name}.nanopd-resume")
    rest.write_bytes(b"".join(raw + b"\n" for raw in kept.values()))
    shutil.copymode(output, rest)
    rest.replace(output)
    return set(kept)


def _run(
    llm: "LLM", sampling: SamplingParams, lines: Iterable[bytes], sinks: list[TextIO], total: int | None, done: set[str]
) -> int:
    """Keeps the engine fed until the lines run out, and writes rows to the sinks (none: texts to stdout).

    Skips the ids in `done`. Returns 1 if a request failed, 130 if interrupted, else 0.
    """
    columns = BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    bar = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
    task, start = bar.add_task("starting", total=total), time.monotonic()
    failed, seen = 0, set[str]()
    with bar, stop_on_signal() as interrupted:
        for number, raw in enumerate(itertools.chain(lines, [None]), 1):
            id = str(number)
            try:
                if raw and raw.strip():
                    fields = msgspec.json.decode(raw.removeprefix(b"\xef\xbb\xbf"), type=dict[str, Any])
                    id = str(msgspec.convert(fields.pop("id", number), str | int))
                    require(id not in seen, f"id {id!r} appeared before; ids must differ")
                    if id not in done:
                        add(llm, sampling, fields, id)
                    seen.add(id)
            except (msgspec.DecodeError, RecursionError, UserError) as error:
                failed += 1
                console.print(f"line {number}: {error}")
                bar.advance(task)
                _write({"id": id, "line": number, "error": str(error)}, sinks)
            # Enough must wait that the scheduler never waits for us, but not the whole file. Behind the last line: all.
            while llm.has_unfinished_requests() and not interrupted():
                s = llm.stats()
                if raw is not None and s.num_waiting < llm.config.max_num_seqs:
                    break
                rate = s.num_scheduled_tokens / (time.monotonic() - start)
                state = f"{s.num_running} running, {s.num_waiting} waiting · KV {s.kv_cache_usage:.0%}"
                bar.update(task, description=f"{rate:.0f} tokens/s · {state} · {failed} failed")
                for output in llm.step():
                    if output.finished:
                        bar.advance(task)
                        row = as_row(output)
                        if row["finish_reason"] == "error":
                            failed += 1
                            console.print(f"request {row['id']}: {row['stop_reason']}")
                            row = {"id": row["id"], "error": row["stop_reason"]}
                        _write(row, sinks)
            if interrupted():
                console.print("Interrupted. What has finished is kept; with --output, --resume goes on from there.")
                return 130
    return 1 if failed else 0


def add(llm: "LLM", sampling: SamplingParams, fields: dict[str, Any], id: str | None = None) -> "RequestOutput":
    """Queues one request: a prompt in one of three forms, and sampling fields that override `sampling`. Uses up `fields`."""
    prompt = {name: fields.pop(name) for name in (*_PROMPTS, "cache_salt") if name in fields}
    require(len(prompt.keys() - {"cache_salt"}) == 1, f"a request needs one of {', '.join(_PROMPTS)}")
    priority = fields.pop("priority", None) or 0
    known = [f.name for f in dataclasses.fields(sampling)]
    if unknown := sorted(fields.keys() - known):
        raise UserError(f"unknown field {', '.join(unknown)}; sampling fields are {', '.join(known)}")
    if "messages" in prompt:
        messages = msgspec.convert(prompt.pop("messages"), _Messages)
        prompt["prompt_token_ids"] = llm.tokenizer.apply_chat_template(messages)
    return llm.add_request(prompt, dataclasses.replace(sampling, **fields), id, priority=priority)


def as_row(output: "RequestOutput") -> dict[str, Any]:
    """A finished request as `--json` and `--output` show it. With n > 1, `outputs` holds all completions."""
    outputs = [dataclasses.asdict(completion) for completion in output.outputs]
    row = {"id": output.request_id, "prompt_token_ids": output.prompt_token_ids} | outputs[0]
    row["metrics"] = output.metrics.as_dict(len(outputs[0]["token_ids"]))
    return row | ({"outputs": outputs} if len(outputs) > 1 else {})


def _write(row: dict[str, Any], sinks: list[TextIO]) -> None:
    for sink in sinks:
        print(json.dumps(row), file=sink, flush=True)
    if not sinks and "error" not in row:
        for i, completion in enumerate(row.get("outputs", [row])):
            print(f"--- {row['id']}{f'.{i}' if i else ''}\n{completion['text']}", flush=True)


def stream(llm: "LLM", output: "RequestOutput") -> str | None:
    """Prints a completion as it comes and returns it; None if Ctrl-C ended it, which leaves the engine usable."""
    (completion,) = output.outputs
    shown = 0
    with stop_on_signal() as interrupted:
        while not output.finished and not interrupted():
            llm.step()
            print(completion.text[shown:], end="", flush=True)
            shown = len(completion.text)
    llm.abort_requests([output.request_id])
    print(end="\n" if shown or completion.finish_reason != "error" else "", flush=True)
    require(completion.finish_reason != "error", str(completion.stop_reason))
    return None if interrupted() else completion.text


@contextlib.contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Ctrl-C ends the run between two steps, so that no answer is half written. A second one ends at once."""
    seen: list[int] = []

    def handle(number: int, _frame: object) -> None:
        seen.append(number)
        signal.signal(number, before[number])

    before: dict[int, Any] = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
