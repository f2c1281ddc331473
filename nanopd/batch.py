"""Many requests from a file: read lazily, answered as they finish, safe to interrupt and to resume.

One input line is one request; what is wrong with a line is said with its number, and the others go on. An answer is
written and flushed the moment its request has finished, so Ctrl-C (or a power cut) loses only what was still running.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from nanopd.config import SamplingParams, UserError

if TYPE_CHECKING:
    from rich.progress import Progress

    from nanopd.engine.llm import LLM, RequestOutput

_SAMPLING = {f.name for f in dataclasses.fields(SamplingParams)}
_PROMPTS = ("prompt", "messages", "prompt_token_ids")


@dataclasses.dataclass(slots=True)
class Line:
    """One request of the input; `error` says why it cannot be one."""

    number: int
    id: str
    fields: dict[str, Any]
    error: str | None = None


def read_lines(file: IO[bytes]) -> Iterator[Line]:
    """The non-empty lines of a JSONL file. A line without an id gets its number as one."""
    seen: set[str] = set()
    for number, raw in enumerate(file, 1):
        if not raw.strip():
            continue
        line = Line(number, str(number), {})
        try:
            fields = msgspec.json.decode(raw.removeprefix(b"\xef\xbb\xbf"))
            if not isinstance(fields, dict):
                raise UserError("a line must hold a JSON object")
            if type(id := fields.pop("id", number)) not in (str, int):
                raise UserError(f"id is {id!r}; it must be a text or a whole number")
            line.id = str(id)
            if line.id in seen:
                raise UserError(f"id {line.id!r} appeared before; ids must differ")
            if sum(name in fields for name in _PROMPTS) != 1:
                raise UserError(f"a line needs one of {', '.join(_PROMPTS)}")
            if unknown := sorted(fields.keys() - _SAMPLING - {*_PROMPTS, "cache_salt"}):
                raise UserError(
                    f"unknown field {', '.join(unknown)}; sampling fields are {', '.join(sorted(_SAMPLING))}"
                )
            line.fields = fields
            seen.add(line.id)
        except (msgspec.DecodeError, RecursionError, UserError) as error:
            line.error = str(error)
        yield line


def as_row(output: "RequestOutput") -> dict[str, Any]:
    """A finished request as `--json` and `--output` show it. With n > 1, `outputs` holds all completions."""
    first, *others = outputs = [dataclasses.asdict(completion) for completion in output.outputs]
    metrics = output.metrics.as_dict(len(first["token_ids"]))
    row = {"id": output.request_id, "prompt_token_ids": output.prompt_token_ids, "metrics": metrics}
    row |= {name: first[name] for name in ("token_ids", "text", "finish_reason", "stop_reason")}
    row |= {"logprobs": first["logprobs"]} if first["logprobs"] is not None else {}
    return row | ({"outputs": outputs} if others else {})


def run_prompts(llm: "LLM", sampling: SamplingParams, todo: list[dict[str, Any]], as_json: bool) -> int:
    """Several prompts from the command line. Returns the exit code."""
    lines = (Line(i, str(i), fields) for i, fields in enumerate(todo))

    def show(row: dict[str, Any]) -> None:
        if as_json:
            print(json.dumps(row), flush=True)
        elif "error" not in row:
            for i, text in enumerate([c["text"] for c in row.get("outputs", [row])]):
                print(f"--- {row['id']}{f'.{i}' if i else ''}\n{text}", flush=True)

    return _run(llm, sampling, lines, show, len(todo))


def run_file(
    load: Callable[[], "LLM"], sampling: SamplingParams, input: Path, output: Path | None, resume: bool, as_json: bool
) -> int:
    """Requests from a file (`-`: stdin) to a file (None: stdout). Returns the exit code."""
    with contextlib.ExitStack() as stack:
        if str(input) == "-" and sys.stdin is None:
            raise UserError("--input - reads standard input, and that is closed.")
        source = sys.stdin.buffer if str(input) == "-" else stack.enter_context(input.open("rb"))
        total = sum(1 for line in source if line.strip()) if source.seekable() else None
        if total is not None:
            source.seek(0)
        done: set[str] = set()
        if output is not None and output.is_file() and output.stat().st_size:
            if input.exists() and output.samefile(input):
                raise UserError("--input and --output are the same file.")
            if not resume:
                raise UserError(f"--output {output} exists; add --resume to go on with it, or choose another name.")
            done = _drop_unfinished(output.resolve())
        llm = load()
        sink = sys.stdout if output is None else stack.enter_context(output.open("a", encoding="utf-8"))

        def write(row: dict[str, Any]) -> None:
            text = json.dumps(row)
            print(text, file=sink, flush=True)
            if as_json and output is not None:
                print(text, flush=True)

        lines = (line for line in read_lines(source) if line.error or line.id not in done)
        return _run(llm, sampling, lines, write, None if total is None else total - len(done))


def _drop_unfinished(output: Path) -> set[str]:
    """Ids already answered. Rows with an error, and a last line cut short, leave the file, to be tried again.

    Raises UserError, and touches nothing, if the file holds anything that we did not write.
    """
    kept: dict[str, bytes] = {}
    *lines, last = output.read_bytes().split(b"\n")  # `last` is empty, or was cut short
    for raw in lines:
        try:
            row = msgspec.json.decode(raw)
            if "error" not in row and row["finish_reason"]:
                kept[row["id"]] = raw
        except (msgspec.DecodeError, KeyError, TypeError):
            raise UserError(
                f"--output {output} holds lines that are no answers of nanopd; choose another file."
            ) from None
    if last or len(kept) < len(lines):
        with tempfile.NamedTemporaryFile(dir=output.parent, prefix=output.name, delete=False) as temporary:
            temporary.write(b"".join(raw + b"\n" for raw in kept.values()))
        shutil.copymode(output, temporary.name)
        os.replace(temporary.name, output)
    return set(kept)


def _run(
    llm: "LLM",
    sampling: SamplingParams,
    lines: Iterator[Line],
    write: Callable[[dict[str, Any]], None],
    total: int | None,
) -> int:
    """Keeps the engine fed until the lines run out. Returns 1 if a request failed, 130 if interrupted, else 0."""
    ahead = 2 * llm.config.max_num_seqs  # enough that the scheduler never waits for us; not the whole file in memory
    finished = failed = unfinished = 0
    bar, start, more = _progress_bar(), time.monotonic(), True
    task = bar.add_task("starting", total=total)

    def note(text: str) -> None:
        bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    with bar, stop_on_signal() as interrupted:
        while (more or unfinished) and not interrupted():
            while more and unfinished < ahead:
                line = next(lines, None)
                if line is None:
                    more = False
                    break
                try:
                    if line.error:
                        raise UserError(line.error)
                    add(llm, sampling, line.fields, line.id)
                    unfinished += 1
                except UserError as error:
                    failed += 1
                    note(f"line {line.number}: {error}")
                    write({"id": line.id, "line": line.number, "error": str(error)})
            for output in llm.step() if unfinished else ():
                if output.finished:
                    unfinished, finished = unfinished - 1, finished + 1
                    write(as_row(output))
            s = llm.stats()
            rate = s.num_scheduled_tokens / (time.monotonic() - start)
            state = f"{s.num_running} running, {s.num_waiting} waiting · KV {s.kv_cache_usage:.0%} · {failed} failed"
            bar.update(task, description=f"{rate:.0f} tokens/s · {state}", completed=finished + failed)
        if interrupted():
            note("Interrupted. What has finished is kept; with --output, --resume goes on from there.")
            return 130
    return 1 if failed else 0


def add(llm: "LLM", sampling: SamplingParams, fields: dict[str, Any], id: str | None = None) -> "RequestOutput":
    """Queues one request: a prompt in one of three forms, and sampling fields that override `sampling`."""
    try:
        params = dataclasses.replace(sampling, **{k: v for k, v in fields.items() if k in _SAMPLING})
    except TypeError as error:
        raise UserError(str(error)) from None
    prompt = {k: v for k, v in fields.items() if k not in _SAMPLING}
    if "messages" in prompt:
        if not prompt["messages"] or not isinstance(prompt["messages"], list):
            raise UserError('messages must be a list like [{"role": "user", "content": "..."}].')
        prompt["prompt_token_ids"] = llm.tokenizer.apply_chat_template(prompt.pop("messages"))
    return llm.add_request(prompt, params, id)


@contextlib.contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Ctrl-C ends the run between two steps, so that no answer is half written. A second one ends at once."""
    seen: list[int] = []

    def handle(number: int, _frame: object) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _progress_bar() -> "Progress":
    """At the bottom of the terminal, on stderr; invisible where stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    console = Console(stderr=True)
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
