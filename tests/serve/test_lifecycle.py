"""How a server starts and ends, whatever ends it: nothing hangs, nobody gets a wrong answer, no process is left."""

import json
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.serve.conftest import Server, is_alive, wait_gone

COMPLETIONS = "/v1/completions"
OPTIONS = ("--num-blocks", "300", "--dtype", "float32")
LONG = {"prompt": "x", "temperature": 0, "max_tokens": 500, "ignore_eos": True}


class Client(threading.Thread):
    """One request in a thread of its own: what came of it."""

    def __init__(self, server: Server, stream: bool, **options: Any) -> None:
        super().__init__()
        self.url, self.body = server.base_url + COMPLETIONS, LONG | {"stream": stream} | options
        self.status = 0
        self.text = ""
        self.start()

    def run(self) -> None:
        request = urllib.request.Request(self.url, json.dumps(self.body).encode())
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                self.status = response.status
                for line in response:
                    self.text += line.decode()
        except urllib.error.HTTPError as error:
            self.status, self.text = error.code, error.read().decode()
        except OSError as error:  # the server is gone, and said nothing
            self.text = str(error)

    def events(self) -> list[Any]:
        data = [line.removeprefix("data: ") for line in self.text.splitlines() if line.startswith("data: ")]
        return [json.loads(event) if event != "[DONE]" else event for event in data]


def wait_running(server: Server, count: int) -> None:
    end = time.monotonic() + 20
    while len(server.state()["running"]) < count:
        assert time.monotonic() < end


def check_ended(client: Client, seconds: float = 10.0) -> None:
    """With an error in OpenAI's form: as the answer, or as the last event of a stream that had begun."""
    client.join(seconds)
    assert not client.is_alive()
    if client.status == 200:
        assert "error" in client.events()[-1], client.text
    else:
        assert client.status == 503
        assert json.loads(client.text)["error"]["type"] == "server_error"


def test_the_port_opens_before_the_engine_is_ready(tiny_model: Path):
    server = Server(tiny_model, *OPTIONS, wait=False)
    with server:
        status, health, _ = server.request("/health")
        assert (status, health) == (503, {"status": "starting"})
        for path, body in ((COMPLETIONS, LONG), ("/v1/models", None), ("/debug/state", None)):
            status, answer, _ = server.request(path, body)
            assert (status, answer["error"]["code"]) == (503, "starting")
        assert server.request("/metrics")[0] == 200
        server.wait_for("Ready.")
        assert server.request("/health")[0] == 200

        # the end: what runs may go on for a while, a newcomer is refused
        clients = [Client(server, stream, max_tokens=200) for stream in (True, False)]
        wait_running(server, 2)
        core = server.core_pid
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        status, answer, _ = server.request(COMPLETIONS, LONG)
        assert (status, answer["error"]["code"]) == (503, "draining")
        assert server.request("/health")[:2] == (503, {"status": "draining"})
        assert server.process.wait(20) == 0
        for client in clients:
            client.join(5)
            assert client.status == 200
        assert clients[0].events()[-1] == "[DONE]"
        assert json.loads(clients[1].text)["usage"]["completion_tokens"] == 200
        assert not is_alive(core)


def test_after_the_grace_running_requests_are_ended(tiny_model: Path):
    with Server(tiny_model, *OPTIONS, "--shutdown-timeout", "0.3") as server:
        clients = [Client(server, stream, n=8) for stream in (True, False)]
        wait_running(server, 16)
        core, start = server.core_pid, time.monotonic()
        assert server.stop(signal.SIGINT) == 0
        assert time.monotonic() - start < 8
        for client in clients:
            check_ended(client)
        assert not is_alive(core)


def test_a_second_signal_ends_at_once(tiny_model: Path):
    with Server(tiny_model, *OPTIONS) as server:
        client = Client(server, True, n=8)
        wait_running(server, 8)
        core, start = server.core_pid, time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert server.process.poll() is None
        assert server.stop(signal.SIGINT) == 130
        assert time.monotonic() - start < 3
        wait_gone(core, 2)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(server.address)
        client.join(5)
        assert not client.is_alive()


def test_the_engine_core_is_killed(tiny_model: Path):
    with Server(tiny_model, *OPTIONS) as server:
        clients = [Client(server, stream, n=4) for stream in (True, True, False)]
        wait_running(server, 12)
        psutil.Process(server.core_pid).kill()
        for client in clients:
            check_ended(client, 5)
        assert server.process.wait(10) == 3
        assert "died" in server.wait_for("Error: ")


@pytest.mark.parametrize("busy", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_server_is_killed(tiny_model: Path, busy: bool):
    with Server(tiny_model, *OPTIONS) as server:
        core = server.core_pid
        if busy:
            Client(server, True, n=8)
            wait_running(server, 8)
        server.kill()
        wait_gone(core)


def test_it_is_stopped_while_it_starts(tiny_model: Path):
    with Server(tiny_model, *OPTIONS, wait=False) as server:
        end = time.monotonic() + 5
        while not psutil.Process(server.api_pid).children():
            assert time.monotonic() < end
        time.sleep(0.2)
        core, start = server.core_pid, time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - start < 3
        assert not is_alive(core)


def test_mistakes_of_the_user(tiny_model: Path, tmp_path: Path):
    with Server(tiny_model, *OPTIONS, wait=False) as server:
        port = str(server.address[1])
        taken = Server(tiny_model, *OPTIONS, "--port", port)
        assert taken.process.wait(30) == 2
        assert f"'127.0.0.1', {port}" in taken.wait_for("Error: ")
    nowhere = Server(tmp_path / "nowhere")
    assert nowhere.process.wait(60) == 2
    assert "nowhere" in nowhere.wait_for("Error: ")
    assert not any("Traceback" in line for line in taken.stderr + nowhere.stderr)


def test_a_killed_server_leaves_no_file(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """kill -9 of both processes: nobody is left who could clean up, so there must be nothing to clean up."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with Server(tiny_model, *OPTIONS) as server:
        core = server.core_pid
        assert not list(tmp_path.glob("nanopd-*"))
        for pid in (server.api_pid, core):
            psutil.Process(pid).kill()
        wait_gone(core)
        assert not list(tmp_path.glob("nanopd-*"))
        server.process.wait(10)
