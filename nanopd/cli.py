"""The command line. Engine and sampling options are made from the fields of EngineConfig and SamplingParams, so they have
the same names and the same help in every command.

Exit codes: 0 done, 1 some requests failed, 2 the user's mistake, 3 ours, 130 interrupted. With `--json`, standard output
holds one JSON object a line and nothing else; what is for people goes to standard error.

Nothing heavy is imported before a command needs it: `nanopd --help` must answer at once.
"""

import contextlib
import dataclasses
import inspect
import logging
import os
import sys
import typing
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from nanopd import __version__
from nanopd.config import EngineConfig, SamplingParams, UserError

if TYPE_CHECKING:
    from nanopd.engine.llm import LLM, RequestOutput

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
bench_app = typer.Typer(no_args_is_help=True, help="Measure.", rich_markup_mode=None)
model_app = typer.Typer(no_args_is_help=True, help="List and fetch models.", rich_markup_mode=None)
app.add_typer(bench_app, name="bench")
app.add_typer(model_app, name="model")

# Options whose name on the command line is not the field's, or whose default there is another.
_NAMES = {
    "enable_prefix_caching": "--prefix-caching/--no-prefix-caching",
    "skip_special_tokens": "--skip-special-tokens/--no-skip-special-tokens",
    "stop_token_ids": "--stop-token-id",
}
_DEFAULTS = {"temperature": 0.0, "max_tokens": 256}


def options_of(config: type[Any], skip: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a command one option for each field of `config`, and calls it with a `config` made from them.

    The command takes it as its parameter of that type. UserError from a value out of range passes through.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(command)
        (name,) = [p.name for p in signature.parameters.values() if p.annotation is config]
        fields = [f for f in dataclasses.fields(config) if f.name not in skip]
        hints = typing.get_type_hints(config)

        def run(*args: Any, **kwargs: Any) -> Any:
            kwargs[name] = config(**{f.name: kwargs.pop(f.name) for f in fields})
            return command(*args, **kwargs)

        parameters = [p for p in signature.parameters.values() if p.name != name]
        for f in fields:
            kind: Any = hints[f.name]
            if typing.get_origin(kind) is tuple:
                kind = list.__class_getitem__(typing.get_args(kind)[:1])
            elif typing.get_origin(kind) is typing.Literal:
                kind = str
            flag = _NAMES.get(f.name, "--" + f.name.replace("_", "-"))
            option = typer.Option(flag, help=f.metadata["help"], show_default=True)
            default = _DEFAULTS.get(f.name, list(f.default) if isinstance(f.default, tuple) else f.default)
            annotation = Annotated[kind, option]
            parameters.append(
                inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            )
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


engine_options = options_of(EngineConfig)
sampling_options = options_of(SamplingParams, skip=("seed",))  # --seed is the engine's: requests draw theirs from it


@app.callback(invoke_without_command=True)
def _main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say what the engine does at start.")] = False,
) -> None:
    """A small LLM inference engine to read, run and take apart."""
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(message)s", stream=sys.stderr)
    if version:
        print(f"nanopd {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


def _load(config: EngineConfig) -> "LLM":
    from nanopd.engine.llm import LLM

    return LLM(**{f.name: getattr(config, f.name) for f in dataclasses.fields(config)})


# ---------------------------------------------------------------- generate


@app.command()
@engine_options
@sampling_options
def generate(
    engine: EngineConfig,
    sampling: SamplingParams,
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; without any, one is read from stdin.")] = None,
    input: Annotated[Path | None, typer.Option(help="JSONL file of requests, - for stdin.", show_default=False)] = None,
    output: Annotated[Path | None, typer.Option(help="Where the answers go, as JSONL.", show_default=False)] = None,
    as_chat: Annotated[bool, typer.Option("--chat", help="Wrap each prompt into the model's chat template.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an --output that was interrupted.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a request.")] = False,
) -> None:
    """Complete prompts: from the command line, from stdin, or a file of requests.

    A line of --input is {"prompt": text} or {"messages": [...]} or {"prompt_token_ids": [...]}, with "id" and any
    sampling option if wanted.
    """
    from nanopd import batch

    if input is not None and (prompts or as_chat):
        raise UserError('Prompts and --chat exclude --input; write the prompts, or {"messages": ...}, into the file.')
    if (output is not None and input is None) or (resume and output is None):
        raise UserError("--output goes with --input, and --resume with --output.")
    if input is not None:
        raise typer.Exit(batch.run_file(partial(_load, engine), sampling, input, output, resume, as_json))
    texts = prompts or [_stdin().read()]
    llm = _load(engine)
    todo = [{"messages": [{"role": "user", "content": text}]} if as_chat else {"prompt": text} for text in texts]
    if len(todo) > 1 or as_json or sampling.n > 1:
        raise typer.Exit(batch.run_prompts(llm, sampling, todo, as_json))
    if _stream(llm, batch.add(llm, sampling, todo[0])) is None:
        raise typer.Exit(130)


def _stdin() -> TextIO:
    if sys.stdin is None:
        raise UserError("There is no prompt, and standard input is closed.")
    if sys.stdin.isatty():
        print("(type a prompt, then Ctrl-D)", file=sys.stderr)
    return sys.stdin


def _stream(llm: "LLM", output: "RequestOutput") -> str | None:
    """Prints a completion as it comes and returns it; None if Ctrl-C ended it, which leaves the engine usable."""
    from nanopd.batch import stop_on_signal

    (completion,) = output.outputs
    try:
        with stop_on_signal() as interrupted:
            shown = 0
            while not output.finished and not interrupted():
                llm.step()
                print(completion.text[shown:], end="", flush=True)
                shown = len(completion.text)
            return None if interrupted() else completion.text
    finally:
        llm.abort_requests([output.request_id])
        print(flush=True)


@app.command()
@engine_options
@sampling_options
def chat(
    engine: EngineConfig,
    sampling: SamplingParams,
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
) -> None:
    """Talk to the model. /reset forgets the conversation, /exit (or Ctrl-D) ends; Ctrl-C stops an answer."""
    from nanopd import batch

    if sampling.n != 1 or sys.stdin is None:
        raise UserError("A chat needs --n 1 and a standard input.")
    llm = _load(engine)
    beginning = [{"role": "system", "content": system}] if system else []
    messages = list(beginning)
    prompt = "> " if sys.stdin.isatty() else ""
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while (text := input(prompt).strip()) not in ("/exit", "/quit"):
            if text == "/reset":
                messages = list(beginning)
                print("(the conversation is forgotten)")
            elif text.startswith("/"):
                print("(/reset forgets the conversation, /exit ends)")
            elif text:
                asked = [*messages, {"role": "user", "content": text}]
                try:
                    answer = _stream(llm, batch.add(llm, sampling, {"messages": asked}))
                    if answer is not None:
                        messages = [*asked, {"role": "assistant", "content": answer}]
                except UserError as error:
                    print(f"{error} (/reset forgets the conversation)", file=sys.stderr)


# ---------------------------------------------------------------- bench, model


@bench_app.command("offline")
@engine_options
def bench_offline(
    engine: EngineConfig,
    requests: Annotated[int, typer.Option(help="Number of requests.", min=1)] = 64,
    input_len: Annotated[str, typer.Option(help="Prompt tokens: a number or a range like 32-256.")] = "32-256",
    output_len: Annotated[str, typer.Option(help="Tokens to generate: a number or a range.")] = "32-128",
    shared_prefix: Annotated[int, typer.Option(help="Tokens at the start that all prompts share.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Throughput and latencies of one batch of random prompts, all arriving at once."""
    from nanopd import bench

    bench.show(bench.offline(_load(engine), requests, input_len, output_len, shared_prefix), as_json)


@bench_app.command("scheduler")
def bench_scheduler(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Microseconds per scheduled request of the scheduler alone, by number running, number waiting and pool size."""
    from nanopd import bench

    for row in bench.scheduler():
        bench.show(row, as_json)


@bench_app.command("kernels")
def bench_kernels(
    target: Annotated[
        list[str] | None, typer.Option(help="Without a GPU: compile for sm_80, sm_90, sm_100 or gfx942 only.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """The Triton kernels: times on a GPU; without one, what they compile to for four GPUs (a minute for each)."""
    from nanopd import bench

    for row in bench.kernels(target or []):
        bench.show(row, as_json)


@model_app.command("list")
def model_list(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a model.")] = False) -> None:
    """Models in the cache."""
    import json

    from nanopd.models.default import list_models

    for name, path in list_models():
        print(json.dumps({"name": name, "path": str(path)}) if as_json else f"{name}  {path}")


@model_app.command("fetch")
def model_fetch() -> None:
    """Get the default model into the cache, if it is not there yet."""
    from nanopd.models.default import fetch_default_model

    print(fetch_default_model())


def main() -> int:
    """Runs a command; turns exceptions into a message and an exit code."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # closed by the caller: then nobody wants to read it
    try:
        returned = app(standalone_mode=False)
        sys.stdout.flush()
        return returned if isinstance(returned, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        print("Interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `nanopd … | head`: the reader has seen enough
        sys.stdout = open(os.devnull, "w")
        return 1
    except UnicodeError as error:
        what = (
            "output cannot be shown in this locale" if isinstance(error, UnicodeEncodeError) else "input is not UTF-8"
        )
        print(f"Error: the {what} ({error}).", file=sys.stderr)
        return 2
    except (UserError, OSError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        if hasattr(error, "show"):  # a mistake in the options, in click's words
            error.show()
            return 2
        logging.getLogger("nanopd").exception("Internal error; please report it with the text below")
        return 3
