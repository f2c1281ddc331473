"""The command line of the benchmarks. `nanopd` loads this file at each start, so nothing heavy is imported up here."""

import dataclasses
import json
from typing import Annotated, Any

import typer

from nanopd.cli import config_options, load
from nanopd.config import EngineConfig, UserError

bench = typer.Typer(no_args_is_help=True, help="Measure.", rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    """Adds `bench` to the command line."""
    app.add_typer(bench, name="bench")


def show(row: dict[str, Any], as_json: bool) -> None:
    """Prints one result: for people, or as one JSON object a line."""
    words = (f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items())
    print(json.dumps(row) if as_json else "  ".join(words), flush=True)


@bench.command("offline")
@config_options
def bench_offline(
    engine: EngineConfig,
    requests: Annotated[int, typer.Option(help="Number of requests.", min=1)] = 64,
    input_len: Annotated[str, typer.Option(help="Prompt tokens: a number or a range like 32-256.")] = "32-256",
    output_len: Annotated[str, typer.Option(help="Tokens to generate: a number or a range.")] = "32-128",
    shared_prefix: Annotated[int, typer.Option(help="Tokens at the start that all prompts share.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Throughput and latencies of one batch of random prompts, all arriving at once."""
    from . import offline

    inputs, outputs = offline.bounds(input_len, "--input-len"), offline.bounds(output_len, "--output-len")
    show(offline.measure(load(engine), requests, inputs, outputs, shared_prefix), as_json)


@bench.command("speculative")
@config_options
def bench_speculative(
    engine: EngineConfig,
    rounds: Annotated[int, typer.Option(help="How often each of the two is measured.", min=1)] = 3,
    output_len: Annotated[int, typer.Option(help="Tokens to generate.", min=1)] = 128,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Tokens per second with drafts (--speculative-ngram, else 4) and without, in turns, at batch 1 and 8."""
    from . import speculative

    drafts = dataclasses.replace(engine, speculative_ngram=engine.speculative_ngram or 4)
    for row in speculative.measure(load(drafts), rounds, output_len):
        show(row, as_json)


@bench.command("scheduler")
def bench_scheduler(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Microseconds per scheduled request of the scheduler alone, by number running, number waiting and pool size."""
    from . import scheduler

    for row in scheduler.measure():
        show(row, as_json)


@bench.command("kernels")
def bench_kernels(
    target: Annotated[
        list[str] | None, typer.Option(help="Without a GPU: compile for sm_80, sm_90, sm_100 or gfx942 only.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """The Triton kernels: times on a GPU; without one, what they compile to for four GPUs (a minute for each)."""
    try:
        from . import kernels
    except ImportError:
        raise UserError("Triton is not installed (it exists for Linux only).") from None
    for row in kernels.measure(target or []):
        show(row, as_json)


@bench.command("transfer")
def bench_transfer(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """KV blocks from one process to another over loopback TCP, by layout, length and state of the pools, against one
    long write of as many bytes."""
    from . import transfer

    for row in transfer.measure():
        show(row, as_json)


@bench.command("serve")
@config_options
def bench_serve(
    engine: EngineConfig,
    rounds: Annotated[int, typer.Option(help="Prompts for each of the two.", min=1)] = 7,
    input_len: Annotated[int, typer.Option(help="Prompt tokens.", min=1)] = 1000,
    output_len: Annotated[int, typer.Option(help="Tokens to generate.", min=1)] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Time to the first token over HTTP: a single node against a router with P and D, all of them started here."""
    from . import serve

    for row in serve.measure(engine, rounds, input_len, output_len):
        show(row, as_json)
