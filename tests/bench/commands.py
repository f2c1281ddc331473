"""The command line of the benchmarks. `nanopd` loads this file at each start, so nothing heavy is imported up here."""

import dataclasses
import json
from pathlib import Path
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
    concurrency: Annotated[
        int | None,
        typer.Option(help="Most requests in the engine; 1: one after the other; without it all at once.", min=1),
    ] = None,
    profile: Annotated[bool, typer.Option(help="Also where the time of a step goes (CPU only).")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Throughput and latencies of random prompts, the same for the same --seed: time to the first token (ttft), and
    between two tokens (itl)."""
    from . import offline

    inputs, outputs = offline.bounds(input_len, "--input-len"), offline.bounds(output_len, "--output-len")
    llm = load(engine)
    work = offline.random_work(llm.core.model.config.vocab_size, requests, inputs, outputs, shared_prefix, engine.seed)
    show(offline.measure(llm, work, concurrency, profile), as_json)


@bench.command("step")
@config_options
def bench_step(
    engine: EngineConfig,
    batch: Annotated[str, typer.Option(help="Requests that decode together; several, comma-separated.")] = "1,8,32,64",
    context: Annotated[str, typer.Option(help="Tokens that each of them has; several.")] = "200,1000,4000",
    steps: Annotated[int, typer.Option(help="Steps for each row; the median counts.", min=1)] = 9,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Where the time of a decode step goes: milliseconds of each part, by batch and context (CPU only).

    64 requests of 4,000 tokens need 11.8 GB in float32 with the default model: --kv-cache-memory 12GiB.
    """
    from . import split

    batches, contexts = split.numbers(batch, "--batch"), split.numbers(context, "--context")
    llm = load(engine)
    if not as_json:
        print(split.headings())
    for row in split.decode_steps(llm, batches, contexts, steps):
        print(json.dumps(row) if as_json else split.line(row), flush=True)


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
    peer_python: Annotated[
        str | None, typer.Option(help="Python of an environment with vLLM: its scheduler and ours in turn.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="With --peer-python: turns of each.", min=1)] = 15,
    logs: Annotated[Path, typer.Option(help="With --peer-python: folder for what vLLM says.")] = Path("/tmp"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Microseconds per scheduled request of the scheduler alone, by number running, number waiting and pool size; or, with
    --peer-python, against vLLM's, decoding only (ratio above 1: ours is faster)."""
    from . import scheduler

    for row in scheduler.against(peer_python, rounds, logs) if peer_python else scheduler.measure():
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


@bench.command("peers")
def bench_peers(
    peer: Annotated[str, typer.Option(help="vllm or transformers.")] = "vllm",
    peer_python: Annotated[
        str | None, typer.Option(help="Python of the environment in which the peer is installed; without it, ours.")
    ] = None,
    workload: Annotated[
        str,
        typer.Option(
            help="One or several of W (64 prompts of 32-256 tokens, 32-128 of output), D (64 x 128, 128), "
            "P (64 x 256, 1) and S (1 x 128, 128)."
        ),
    ] = "WDPS",
    pairs: Annotated[int, typer.Option(help="Turns of each, for each workload.", min=1)] = 5,
    requests: Annotated[
        int | None, typer.Option(help="Most prompts of a workload, where 64 would take too long.", min=1)
    ] = None,
    model: Annotated[str | None, typer.Option(help="As for the engine; without it the default model.")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16, of both.")] = "float32",
    threads: Annotated[int, typer.Option(help="Threads of each.", min=1)] = 2,
    eager: Annotated[bool, typer.Option(help="vLLM without torch.compile.")] = False,
    preload: Annotated[str, typer.Option(help="Libraries to load before both engines, as in LD_PRELOAD.")] = "",
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    logs: Annotated[Path, typer.Option(help="Folder for what the engines say.")] = Path("/tmp"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Another engine and ours in turn on the same prompts, each loaded in a process of its own: seconds, and their ratio
    (above 1: ours is faster). tests/bench/peers.py says how to install vLLM for that."""
    from . import peers

    options = {"model": model, "dtype": dtype, "threads": threads, "eager": eager}
    for row in peers.measure(peer, peer_python, workload, pairs, requests, options, seed, preload, logs):
        show(row, as_json)
