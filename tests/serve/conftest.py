"""A real server in processes of its own, for tests that talk HTTP to it."""

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from tests.engine.conftest import tiny_model  # noqa: F401 (a fixture)

# `nanopd serve`; as long as the command line does not have it, it is added here.
_MAIN = """
import sys
import typer
from nanopd import cli
from nanopd.config import EngineConfig, KVTransferConfig
from nanopd.serve.config import ServeConfig

def serve(engine: EngineConfig, kv_transfer: KVTransferConfig, server: ServeConfig) -> None:
    from nanopd.serve import api
    raise typer.Exit(api.serve(engine, kv_transfer, server))

if all(command.callback.__name__ != "serve" for command in cli.app.registered_commands):
    cli.app.command("serve")(cli.config_options(serve))
sys.exit(cli.main())
"""


class Server:
    """`nanopd serve` on ephemeral ports of 127.0.0.1 (HTTP, and the side channel of a P).

    As a context manager it is ready when the block begins and gone when it ends:

        with Server(model, "--num-blocks", "100") as server:
            server.post("/v1/completions", prompt="x")

    `stderr` holds the lines it has said so far.
    """

    def __init__(self, model: Path | str, *options: str, wait: bool = True) -> None:
        command = [sys.executable, "-c", _MAIN, "serve", "--model", str(model), "--port=0", "--kv-port=0", *options]
        self.stderr: list[str] = []
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.api_pid = self.process.pid
        self._wait_ready = wait

    def _read(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            self.stderr.append(line.rstrip("\n"))

    def wait_for(self, beginning: str, seconds: float = 60.0) -> str:
        """The first line on stderr that begins like this; what follows the beginning."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for line in list(self.stderr):
                if line.startswith(beginning):
                    return line.removeprefix(beginning)
            if self.process.poll() is not None:
                self._reader.join(5)
                if not any(line.startswith(beginning) for line in self.stderr):
                    break
            time.sleep(0.01)
        raise AssertionError(f"no line {beginning!r} (exit code {self.process.poll()}):\n" + "\n".join(self.stderr))

    @property
    def base_url(self) -> str:
        """http://127.0.0.1:PORT"""
        return "http://" + self.wait_for("Listening on http://")

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, for sockets."""
        host, port = self.base_url.removeprefix("http://").split(":")
        return host, int(port)

    @property
    def core_pid(self) -> int:
        """The engine core's process: the server's only child."""
        (pid,) = children(self.api_pid)
        return pid

    def __enter__(self) -> "Server":
        try:
            self.wait_for("Ready." if self._wait_ready else "Listening on")
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        if self.process.poll() is None and kind is None:
            code = self.stop()
            assert code == 0, "\n".join(self.stderr)
        else:
            self.kill()

    def stop(self, number: int = signal.SIGTERM, timeout: float = 40.0) -> int:
        """Sends a signal and waits. Returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout)

    def kill(self) -> None:
        """kill -9: the API's process. The engine core's process ends by itself soon."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)

    def request(
        self,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        timeout: float = 60.0,
        method: str | None = None,
    ) -> tuple[int, Any, dict[str, str]]:
        """GET, or POST if there is a body (bytes as they are), or `method`. Returns status, JSON or text, headers."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.base_url + path, data, headers or {}, method=method)
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                status, raw, got = response.status, response.read(), dict(response.headers)
        except urllib.error.HTTPError as error:
            status, raw, got = error.code, error.read(), dict(error.headers)
        kind = got.get("Content-Type", "")
        return status, json.loads(raw) if kind.startswith("application/json") else raw.decode(), got

    def post(self, path: str, headers: dict[str, str] | None = None, **body: Any) -> Any:
        """The answer to a request that must succeed."""
        status, answer, _ = self.request(path, body, headers)
        assert status == 200, answer
        return answer

    def stream(self, path: str, headers: dict[str, str] | None = None, **body: Any) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer. After [DONE] it ends; AssertionError if the stream ends without it."""
        data = json.dumps(body | {"stream": True}).encode()
        request = urllib.request.Request(self.base_url + path, data, headers or {})
        with urllib.request.urlopen(request, timeout=60.0) as response:
            assert response.headers["Content-Type"].startswith("text/event-stream")
            for line in response:
                if line.startswith(b"data: "):
                    if line == b"data: [DONE]\n":
                        return
                    yield json.loads(line[len(b"data: ") :])
        raise AssertionError("the stream ended without [DONE]")

    def state(self, headers: dict[str, str] | None = None) -> dict[str, Any]:
        """/debug/state"""
        status, state, _ = self.request("/debug/state", headers=headers)
        assert status == 200, state
        return dict(state)

    def wait_empty(self, seconds: float = 10.0, headers: dict[str, str] | None = None) -> None:
        """Until the engine holds no request and no block."""
        end = time.monotonic() + seconds
        while True:
            state = self.state(headers)
            if not state["requests"] and not state["reclaiming"] and state["free_blocks"] == state["num_blocks"]:
                return
            assert time.monotonic() < end, state
            time.sleep(0.02)


@pytest.fixture(scope="session")
def server(tiny_model: Path) -> Iterator[Server]:  # noqa: F811
    """One that tests may share which leave nothing behind."""
    with Server(
        tiny_model, "--num-blocks", "300", "--dtype", "float32", "--check-invariants", "--max-waiting=100"
    ) as it:
        yield it


def children(pid: int) -> list[int]:
    """Ids of the processes that this one has started and that still run."""
    import psutil

    return [child.pid for child in psutil.Process(pid).children()]


def is_alive(pid: int) -> bool:
    """Whether a process still runs (a zombie does not)."""
    import psutil

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_gone(pid: int, seconds: float = 10.0) -> None:
    """Until a process has ended."""
    end = time.monotonic() + seconds
    while is_alive(pid):
        assert time.monotonic() < end, f"process {pid} still runs"
        time.sleep(0.05)
