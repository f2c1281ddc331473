"""`nanopd pd-demo`: real nodes of a small random model. It shows what happened, and leaves no process behind."""

import asyncio
import contextlib
import http.server
import importlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from nanopd import cli
from nanopd.config import UserError
from tests.engine.conftest import tiny_model  # noqa: F401 (a fixture)
from tests.serve.conftest import Server

cli.add_checkout_commands()
pd_demo: Any = importlib.import_module("nanopd_lessons.pd_demo")
pd_view: Any = importlib.import_module("nanopd_lessons.pd_view")
nodes: Any = importlib.import_module("nanopd_lessons.nodes")


def _as_in_the_background() -> None:
    """What a script's shell does to a command with `&`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class Demo:
    """`nanopd pd-demo` in a process. All processes that it starts have its mark in their environment."""

    def __init__(self, *arguments: str) -> None:
        self.mark = uuid.uuid4().hex
        command = [sys.executable, "-m", "nanopd", "pd-demo", *arguments]
        environment, pipe = os.environ | {"NANOPD_TEST_MARK": self.mark}, subprocess.PIPE
        self.process = subprocess.Popen(
            command, env=environment, stdout=pipe, stderr=pipe, text=True, preexec_fn=_as_in_the_background
        )

    def processes(self) -> list[psutil.Process]:
        """Itself, if it still runs, and what it has started."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("NANOPD_TEST_MARK") == self.mark:
                    found.append(process)
        return found

    def result(self, timeout: float = 180.0) -> tuple[int, str, str]:
        """Exit code, stdout and stderr, when it has ended; then no process may be left."""
        try:
            out, err = self.process.communicate(timeout=timeout)
            assert self.processes() == []
            return self.process.returncode, out, err
        finally:
            for process in self.processes():
                process.kill()


SMALL = "--prompt-tokens=200", "--max-tokens=12"


def check_rows(out: str) -> list[dict[str, Any]]:
    """Six rows and a summary, all well."""
    *rows, summary = [json.loads(line) for line in out.splitlines()]
    assert len(rows) == summary["requests"] == 6
    assert summary["equal"] is True and all(row["equal"] and row["error"] is None for row in rows)
    assert summary["kv_bytes"] == sum(row["kv_bytes"] for row in rows) > 0
    assert all(len(row["tokens"]) == row["completion_tokens"] == 12 for row in rows)
    return rows


def test_rows_and_equality(tiny_model: Path):  # noqa: F811
    code, out, err = Demo("--json", "--model", str(tiny_model), "--check-invariants", *SMALL).result()
    assert code == 0, err
    rows = {row["id"]: row for row in check_rows(out)}
    block_bytes = 2 * 3 * 2 * 16 * 16 * 4  # K and V, layers, KV heads, head_dim, tokens, float32
    long = rows["long"]
    assert long["prompt_tokens"] == 200 and long["kv_bytes"] == 13 * block_bytes and long["cached_on_d"] == 0
    assert long["prefill_seconds"] > 0 and long["transfer_seconds"] > 0 and long["kv_pieces"] >= 1
    shared = rows["prefix 2"]  # of its 125 tokens 100 were there, and of those 96 in whole blocks
    assert shared["cached_on_d"] == 96 and shared["kv_bytes"] == 2 * block_bytes
    assert rows["tiny"]["kv_bytes"] == 0 and rows["tiny"]["cached_on_d"] == 0  # less than a block: D computes it
    assert "WAITING_FOR_REMOTE_KVS" in err and "is ready after" in err  # what is for people


@pytest.mark.parametrize(("number", "until"), [(signal.SIGINT, "prompts to the router"), (signal.SIGTERM, "")])
def test_an_interrupt_leaves_nothing(tiny_model: Path, number: int, until: str):  # noqa: F811
    demo = Demo("--model", str(tiny_model), "--prompt-tokens=300", "--max-tokens=200")
    assert demo.process.stdout
    if until:  # while it works
        assert any(until in line for line in demo.process.stdout)
    end = time.monotonic() + 60
    while len(demo.processes()) < 5:  # or while P and D, a server and an engine core each, load the model
        assert time.monotonic() < end
        time.sleep(0.02)
    demo.process.send_signal(number)
    assert demo.result(timeout=30)[0] == 130


def test_a_node_that_does_not_start():
    with nodes.Processes(Console(file=io.StringIO())) as processes:
        node = processes.start("P", "serve", "--port=-5")
        with pytest.raises(UserError, match=r"P ended with exit code 2\. The end of its log:\n  \| Error: port is -5;"):
            asyncio.run(processes.wait("Ready.", node))


@contextlib.contextmanager
def something_else(health: bytes) -> Iterator[str]:
    """A server that answers everything with this."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(health)

        def log_message(self, *_: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ("http://127.0.0.1:1,http://127.0.0.1:2", "No node of nanopd answers at http://127.0.0.1:1 "),
        ("127.0.0.1:1", "it must be P_URL,D_URL or P_URL,D_URL,ROUTER_URL"),
        ("D,D", "is no prefill node, its role is decode"),
    ],
)
def test_wrong_hosts(hosts: str, message: str):
    with something_else(b'{"status": "ok", "role": "decode"}') as url:
        code, out, err = Demo("--hosts", hosts.replace("D", url)).result()
    assert code == 2 and message in err and out == ""


def test_a_request_that_came_and_went_within_one_step_was_running():
    track = pd_view.Track(sent=1.0)
    track.see("waiting", 0.9, 1.1)
    track.see("reclaiming", 1.1, 1.5)
    track.see("", 1.5, 1.6)
    assert list(zip(track.times, track.states)) == [(1.0, "waiting"), (1.1, "running"), (1.5, "reclaiming"), (1.6, "")]
    assert [track.between(t, t + 0.1) for t in (0.5, 1.0, 1.2, 1.45, 1.7)] == [
        "", "running", "running", "reclaiming", "",
    ]  # fmt: skip


def test_what_d_found_follows_from_the_bytes():
    def answer(prompt_tokens: int, num_bytes: int, *history: str, cached: int = 0) -> Any:
        usage = {"prompt_tokens": prompt_tokens, "prompt_tokens_details": {"cached_tokens": cached}}
        transfer = {"num_bytes": num_bytes} if num_bytes else None
        metrics = {"transfer": transfer, "history": [(0.0, status) for status in history]}
        return pd_demo.Answer(0.0, usage=usage, metrics=metrics)

    loading = pd_view.LOADING
    answers = [answer(40, 300, loading), answer(80, 200, loading), answer(50, 0, cached=48), answer(60, 0, loading)]
    assert pd_demo.found_on_d(answers, 16) == [0, 48, 48, None]  # the last: its load has failed


def can_make_namespaces() -> bool:
    if os.name != "posix" or os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", "nanopd-try"], capture_output=True).returncode == 0
    return made and subprocess.run(["ip", "netns", "del", "nanopd-try"]).returncode == 0


@pytest.mark.slow
def test_two_network_namespaces(tiny_model: Path):  # noqa: F811
    if not can_make_namespaces():
        pytest.skip("needs root and network namespaces")
    code, out, err = Demo("--netns", "--json", "--model", str(tiny_model), "--kv-push=per_chunk", *SMALL).result()
    assert code == 0, err
    check_rows(out)
    assert "P is ready after" in err and "http://10.77.0.1:" in err and "http://10.77.0.2:" in err
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    links = subprocess.run(["ip", "link"], capture_output=True, text=True).stdout
    assert "nanopd-" not in listed + links


@pytest.mark.slow
def test_nodes_started_elsewhere(tiny_model: Path):  # noqa: F811
    options = "--dtype=float32", "--num-blocks=200", "--api-key=secret"
    with Server(tiny_model, "--role=prefill", *options) as p, Server(tiny_model, "--role=decode", *options) as d:
        hosts = f"{p.base_url},{d.base_url}"
        code, out, err = Demo("--hosts", hosts, "--json", "--api-key=secret", *SMALL).result()
        assert code == 0, err
        check_rows(out)
        code, out, err = Demo("--hosts", hosts, *SMALL).result()
        assert code == 2 and "Send the API key" in err and out.count("\n") <= 1
