"""Time to the first token over HTTP, of one node and of P/D: `nanopd bench serve`.

A router, a P, a D and a single node, each in processes of its own, and one client that streams. It asks the single node and
the router in turn, both for the same prompt, which neither has seen: so the machine is otherwise idle, and whatever it does
besides hits both alike. What P/D costs on top is the way through the router, the transfer, and a step on D (`decode_ms`).
"""

import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from nanopd.config import EngineConfig, UserError
from nanopd.engine.core import has_instructions_for
from nanopd.models.loader import load_config, resolve_model

START_SECONDS = 120.0
_ROLES = ("prefill", "decode", None)
_NAMES = {"enable_prefix_caching": "prefix-caching"}  # options that are not called like their field


def measure(config: EngineConfig, num_rounds: int, input_len: int, output_len: int) -> Iterator[dict[str, Any]]:
    """A row for the single node, and one for P/D with the ratio of the medians, and the median of the ratios: on a machine
    that is busy otherwise, the two of a pair have more in common."""
    model, dtype = load_config(resolve_model(config.model)), config.dtype
    if dtype == "auto":  # as the engine decides it
        emulated = not torch.cuda.is_available() and not has_instructions_for(torch.bfloat16)
        dtype = "float32" if emulated else model.dtype
    if config.num_blocks is None and config.kv_cache_memory is None:  # three engines share this machine's memory
        config = dataclasses.replace(config, num_blocks=4 * -(-(input_len + output_len) // config.block_size))
    answers: dict[str, list[dict[str, Any]]] = {"single": [], "P/D": []}
    with _running(dataclasses.replace(config, dtype=dtype)) as urls:
        rng = random.Random(config.seed)
        for i in range(-1, num_rounds):  # the first round warms up
            prompt = [rng.randrange(model.vocab_size) for _ in range(input_len)]
            for setup in ("single", "P/D") if i % 2 else ("P/D", "single"):
                answer = _ask(urls[setup], prompt, output_len)
                if i >= 0:
                    answers[setup].append(answer)
    common = {"engine": "nanopd", "model": str(config.model or "default"), "dtype": dtype}
    single, pd = (common | _row(setup, input_len, given) for setup, given in answers.items())
    yield single
    paired = statistics.median(two["ttft"] / one["ttft"] for one, two in zip(*answers.values()))
    ratios = {"ttft_ratio": pd["ttft_p50_ms"] / single["ttft_p50_ms"], "ttft_ratio_of_pairs": paired}
    yield pd | _parts(answers["P/D"]) | ratios


def _row(setup: str, input_len: int, answers: list[dict[str, Any]]) -> dict[str, Any]:
    seconds, num_output = sum(a["seconds"] for a in answers), sum(a["output_tokens"] for a in answers)
    ttfts = sorted(1000 * a["ttft"] for a in answers)
    return {
        "setup": setup,
        "requests": len(answers),
        "input_tokens": input_len * len(answers),
        "output_tokens": num_output,
        "seconds": seconds,
        "output_tokens_per_s": num_output / seconds,
        "ttft_p50_ms": statistics.median(ttfts),
        "ttft_min_ms": ttfts[0],
        "ttft_max_ms": ttfts[-1],
        "server_ttft_p50_ms": 1000 * statistics.median(a["metrics"]["time_to_first_token"] for a in answers),
    }


def _parts(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of where D's time to the first token goes: waiting for the blocks (P's prefill, the transfer, and all that
    lies between), and the step that computes the last token of the prompt."""
    loads, steps, prefills, sends = [], [], [], []
    for metrics in (a["metrics"] for a in answers):
        if transfer := metrics["transfer"]:
            since = {status: at for at, status in metrics["history"]}  # the last time
            loads.append(since["waiting"] - since["waiting for remote KVs"])
            steps.append(metrics["time_to_first_token"] - since["running"])
            prefills.append(transfer["prefill_seconds"])
            sends.append(transfer["seconds"])
    parts = {"load": loads, "prefill": prefills, "transfer": sends, "decode": steps}
    medians = {f"{name}_p50_ms": 1000 * statistics.median(of) for name, of in parts.items() if of}
    return {"transferred": len(loads)} | medians


def _ask(url: str, prompt: list[int], output_len: int) -> dict[str, Any]:
    """One completion: seconds to the first text and to the end, and what the server says of it."""
    body = {"prompt": prompt, "max_tokens": output_len, "temperature": 0, "ignore_eos": True, "stream": True}
    data = json.dumps(body | {"stream_options": {"include_usage": True}}).encode()
    answer: dict[str, Any] = {}
    start = time.perf_counter()
    with urllib.request.urlopen(urllib.request.Request(url + "/v1/completions", data), timeout=600) as response:
        for line in response:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "ttft" not in answer and event["choices"][0]["text"]:
                    answer["ttft"] = time.perf_counter() - start
                answer |= {"metrics": event["metrics"]} if "metrics" in event else {}
                if event.get("usage"):
                    answer["output_tokens"] = event["usage"]["completion_tokens"]
    answer["seconds"] = time.perf_counter() - start
    return {"ttft": answer["seconds"]} | answer  # where all text came with the end


# ---------------------------------------------------------------- processes


@contextmanager
def _running(config: EngineConfig) -> Iterator[dict[str, str]]:
    """All processes, and the addresses of the single node and of the router. They end with the block."""
    options = []
    for field in dataclasses.fields(config):
        name, value = _NAMES.get(field.name, field.name.replace("_", "-")), getattr(config, field.name)
        if isinstance(value, bool):
            options.append(f"--{'' if value else 'no-'}{name}")
        elif value is not None:
            options.append(f"--{name}={value}")
    with ExitStack() as stack:
        roles = (("--kv-port=0", f"--role={role}") if role else () for role in _ROLES)
        nodes = [stack.enter_context(_process("serve", *role, *options)) for role in roles]
        p, d, single = (_wait(node, "Ready.") for node in nodes)
        router = stack.enter_context(_process("route", f"--prefill={p}", f"--decode={d}"))
        yield {"single": single, "P/D": _wait(router, "Listening on")}


Process = tuple["subprocess.Popen[bytes]", Any]  # with the file that its stderr goes to


@contextmanager
def _process(command: str, *options: str) -> Iterator[Process]:
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    with tempfile.TemporaryFile() as stderr:
        program = (sys.executable, "-m", "nanopd", command, "--port=0", *options)
        process = subprocess.Popen(program, stderr=stderr, env=environment, start_new_session=True)
        try:
            yield process, stderr
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(started: Process, sign: str) -> str:
    """Until the process has said `sign`. Returns its URL."""
    (process, stderr), end = started, time.monotonic() + START_SECONDS
    while True:
        lines = os.pread(stderr.fileno(), 2**20, 0).decode(errors="replace").splitlines()
        if any(line.startswith(sign) for line in lines):
            return next(line.split()[2] for line in lines if line.startswith("Listening on "))
        if process.poll() is not None or time.monotonic() > end:
            raise UserError("A server does not start; it said: " + " / ".join(lines[-5:]))
        time.sleep(0.02)
