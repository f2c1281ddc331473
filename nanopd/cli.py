"""The command line. Options are made from the fields of EngineConfig, SamplingParams and the other configs, so they have
the same names and the same help in every command.

Exit codes: 0 done, 1 some requests failed, 2 the user's mistake, 3 ours, 130 interrupted. With `--json`, standard output
holds one JSON object a line and nothing else; what is for people goes to standard error.

Nothing heavy is imported before a command needs it: `nanopd --help` must answer at once.
"""

import contextlib
import dataclasses
import importlib
import inspect
import logging
import os
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanopd import __version__
from nanopd.config import EngineConfig, KVTransferConfig, SamplingParams, StructuredOutputsParams, UserError, require
from nanopd.serve.config import RouterConfig, ServeConfig

if TYPE_CHECKING:
    from nanopd.engine.llm import LLM

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
model_app = typer.Typer(no_args_is_help=True, help="List and fetch models.", rich_markup_mode=None)
app.add_typer(model_app, name="model")

CHECKOUT = Path(__file__).parent.parent  # or where the package is installed

# Options whose name on the command line is not the field's, or whose default there is another.
_NAMES = {"enable_prefix_caching": ["--prefix-caching/--no-prefix-caching"], "stop_token_ids": ["--stop-token-id"]}
_DEFAULTS = {"temperature": 0.0, "max_tokens": 256}


def config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command one option for each field of the configs among its parameters, and calls it with configs made
    from them. UserError from a value out of range passes through.

    Of two fields with one name the first gets the option: `--seed` is the engine's, and requests draw theirs from it.
    """
    signature = inspect.signature(command)
    parameters = dict(signature.parameters)
    configs: dict[str, Any] = {n: p.annotation for n, p in parameters.items() if dataclasses.is_dataclass(p.annotation)}
    fields: dict[str, list[str]] = {}  # by config: those that have an option
    for name, config in configs.items():
        del parameters[name]
        options = {p.name: p for p in _options(config) if p.name not in parameters}
        fields[name] = list(options)
        parameters |= options

    def run(**given: Any) -> Any:
        for name, config in configs.items():
            given[name] = config(**{field: given.pop(field) for field in fields[name]})
        return command(**given)

    run.__signature__ = signature.replace(parameters=list(parameters.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters.values()}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def _options(config: type[Any]) -> list[inspect.Parameter]:
    options, hints = [], typing.get_type_hints(config)
    for f in dataclasses.fields(config):
        kind, default = hints[f.name], _DEFAULTS.get(f.name, f.default)
        if isinstance(default, tuple):
            kind, default = list.__class_getitem__(typing.get_args(kind)[:1]), list(default)
        elif StructuredOutputsParams in typing.get_args(kind):
            kind = str | None  # its fields, as JSON
        option = typer.Option(*_NAMES.get(f.name, ()), help=f.metadata["help"])
        keyword = inspect.Parameter.KEYWORD_ONLY
        options.append(inspect.Parameter(f.name, keyword, default=default, annotation=Annotated[kind, option]))
    return options


def add_checkout_commands() -> None:
    """Benchmarks and lessons are not part of the engine, but in a source checkout they stand beside the package. Each
    is a package of its own (another `tests` may be installed), with a module `commands` whose `register` adds them."""
    for folder in (CHECKOUT / "tests/bench", CHECKOUT / "lessons"):
        name = f"nanopd_{folder.name}"
        if (folder / "commands.py").is_file() and f"{name}.commands" not in sys.modules:
            if name not in sys.modules:
                package = sys.modules[name] = types.ModuleType(name)
                package.__path__ = [str(folder)]
            importlib.import_module(f"{name}.commands").register(app)


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


def load(config: EngineConfig) -> "LLM":
    """The engine, with its tokenizer."""
    from nanopd.engine.llm import LLM

    return LLM(**{f.name: getattr(config, f.name) for f in dataclasses.fields(config)})


# ---------------------------------------------------------------- generate, chat


@app.command()
@config_options
def generate(
    engine: EngineConfig,
    sampling: SamplingParams,
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; without any, one is read from stdin.")] = None,
    input: Annotated[Path | None, typer.Option(help="JSONL file of requests, - for stdin.", show_default=False)] = None,
    output: Annotated[Path | None, typer.Option(help="Where the answers go, as JSONL.", show_default=False)] = None,
    as_chat: Annotated[bool, typer.Option("--chat", help="Wrap each prompt into the model's chat template.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an --output that was interrupted.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a request.")] = False,
) -> int:
    """Complete prompts: from the command line, from stdin, or a file of requests.

    A line of --input is {"prompt": text} or {"messages": [...]} or {"prompt_token_ids": [...]}, with "id" and any
    sampling option if wanted.
    """
    from nanopd import batch

    if (input is not None and (prompts or as_chat)) or (output and not input) or (resume and not output):
        raise UserError("Prompts and --chat exclude --input; --output goes with --input, and --resume with --output.")
    if input is None:
        return batch.run_prompts(lambda: load(engine), sampling, prompts, as_chat, as_json)
    return batch.run_file(lambda: load(engine), sampling, input, output, resume, as_json)


@app.command()
@config_options
def chat(
    engine: EngineConfig,
    sampling: SamplingParams,
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
) -> None:
    """Talk to the model. /reset forgets the conversation, /exit (or Ctrl-D) ends; Ctrl-C stops an answer."""
    from nanopd import batch

    require(sampling.n == 1, "A chat needs --n 1.")
    prompt, llm = "> " if batch.stdin().isatty() else "", load(engine)
    beginning = [{"role": "system", "content": system}] if system else []
    messages = beginning
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while (text := input(prompt).strip()) != "/exit":
            if text == "/reset":
                messages = beginning
                print("(the conversation is forgotten)")
            elif text.startswith("/"):
                print("(/reset forgets the conversation, /exit ends)")
            elif text:
                asked = [*messages, {"role": "user", "content": text}]
                try:
                    answer = batch.stream(llm, batch.add(llm, sampling, {"messages": asked}))
                    messages = messages if answer is None else [*asked, {"role": "assistant", "content": answer}]
                except UserError as error:
                    print(f"{error} (/reset forgets the conversation)", file=sys.stderr)


# ---------------------------------------------------------------- model


@app.command()
@config_options
def serve(engine: EngineConfig, kv_transfer: KVTransferConfig, server: ServeConfig) -> int:
    """Serve the OpenAI-compatible API over HTTP; with --role, as one node of P/D disaggregation."""
    from nanopd.serve import api

    return api.serve(engine, kv_transfer, server)


@app.command()
@config_options
def route(config: RouterConfig) -> int:
    """Put one address in front of prefill nodes and decode nodes."""
    from nanopd.serve import router

    return router.route(config)


@app.command()
def trace(
    how: Annotated[str, typer.Argument(help="show: in the terminal; html: as a page; perfetto: for ui.perfetto.dev.")],
    files: Annotated[list[Path], typer.Argument(help="Traces, made with --trace; P's and D's of one run together.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write.", show_default=False)] = None,
    follow: Annotated[bool, typer.Option("--follow", help="show: go on while the engine runs.")] = False,
) -> None:
    """Look at traces: every step, what was decided in it and why, and what the engine held after it."""
    from nanopd.trace import export, show

    if how == "show" and len(files) == 1 and not output:
        show.show(files[0], follow)
    elif how in ("html", "perfetto") and not follow:
        output = output or files[0].with_suffix(".html" if how == "html" else ".perfetto.json")
        output.write_bytes(export.html(files).encode() if how == "html" else export.perfetto(files))
        print(output)
    else:
        raise UserError("It is trace show FILE [--follow], or trace html FILE… [-o FILE], or perfetto instead of html.")


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
        add_checkout_commands()
        code = app(standalone_mode=False)
        sys.stdout.flush()
        return code or 0
    except (KeyboardInterrupt, typer.Abort):
        print("Interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `nanopd … | head`: the reader has seen enough
        sys.stdout = open(os.devnull, "w")
        return 1
    except (UserError, OSError, UnicodeError) as error:  # the last: no UTF-8 came in, or the locale can't show it
        print(f"Error: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        if hasattr(error, "show"):  # a mistake in the options, in click's words
            error.show()
            if "No such command" in str(error) and not (CHECKOUT / "tests/bench").is_dir():
                print("(Benchmarks and lessons need a source checkout of nanopd.)", file=sys.stderr)
            return 2
        logging.getLogger("nanopd").exception("Internal error; please report it with the text below")
        return 3
