"""nanopd nodes as real processes, started through the command line, on this machine or on two network namespaces of it.

Whatever happens, they are gone when the `with` block is left: they run in sessions of their own, so that a Ctrl-C in the
terminal reaches only us, and we stop them in order. This file knows nothing about requests.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from rich.console import Console

from nanopd.config import EngineConfig, UserError

READY_TIMEOUT = 600.0  # seconds to load a model; the first time it is fetched, too
STOP_TIMEOUT = 10.0  # seconds to end by itself


def end_like_ctrl_c() -> None:
    """A `kill` and a closed terminal end this program as a Ctrl-C does, so that `with` blocks are left in order."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what runs in the background ignore it
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: signal.raise_signal(signal.SIGINT))


def as_options(config: EngineConfig) -> list[str]:
    """A config as options of the command line."""
    flags = {"enable_prefix_caching": "--no-prefix-caching", "check_invariants": "--check-invariants"}
    options: list[str] = []
    for f in fields(config):
        if (value := getattr(config, f.name)) != f.default:
            options.append(flags.get(f.name) or f"--{f.name.replace('_', '-')}={value}")
    return options


@dataclass
class Process:
    """One `nanopd …`, and the file with what it says."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path

    def said(self, beginning: str) -> str | None:
        """What follows `beginning` in the first line that begins so."""
        for line in self.log.read_text(errors="replace").splitlines():
            if line.startswith(beginning):
                return line.removeprefix(beginning).strip()
        return None

    def end_of_log(self) -> str:
        """Its last lines."""
        return "\n".join(f"  | {line}" for line in self.log.read_text(errors="replace").splitlines()[-15:])

    @property
    def url(self) -> str:
        url = self.said("Listening on ")
        assert url, f"{self.name} is not listening yet"
        return url


class Processes:
    """Those that run. A context manager: at its end none does."""

    def __init__(self, console: Console) -> None:
        self._console, self._running = console, list[Process]()
        self._logs = tempfile.TemporaryDirectory(prefix="nanopd-demo-")
        self._threads = str(max(1, (os.cpu_count() or 2) // 2))  # P and D compute at the same time

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.stop()
        finally:
            self._logs.cleanup()

    @property
    def directory(self) -> Path:
        """For logs and the like; it goes with the processes."""
        return Path(self._logs.name)

    def start(
        self, name: str, *arguments: str, netns: str | None = None, environment: dict[str, str] | None = None
    ) -> Process:
        """Starts `nanopd ARGUMENTS`."""
        command = ["ip", "netns", "exec", netns] if netns else []
        command += [sys.executable, "-m", "nanopd", "--verbose", *arguments]
        log = self.directory / f"{name.replace(' ', '-')}.log"
        variables = {"OMP_NUM_THREADS": self._threads} | os.environ | (environment or {})
        with log.open("wb") as file:
            popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=variables, start_new_session=True
            )
        self._running.append(process := Process(name, popen, log))
        return process

    async def wait(self, beginning: str, *processes: Process) -> None:
        """Until each has said a line that begins like this. Raises UserError, with the end of its log, if one ends."""
        start, missing = time.monotonic(), list(processes)
        with self._console.status("") as status:
            while missing:
                seconds = time.monotonic() - start
                status.update(f"waiting for {' and '.join(p.name for p in missing)} … {seconds:.0f} s")
                for process in list(missing):
                    ended = process.popen.poll() is not None
                    if process.said(beginning) is not None:
                        missing.remove(process)
                        self._console.print(f"{process.name} is ready after {seconds:.1f} s: {process.url}")
                    elif ended or seconds > READY_TIMEOUT:
                        what = f"ended with exit code {process.popen.poll()}" if ended else "is not ready in time"
                        raise UserError(f"{process.name} {what}. The end of its log:\n{process.end_of_log()}")
                await asyncio.sleep(0.1)

    def dead(self) -> list[Process]:
        """Those that have ended though nobody has stopped them."""
        return [process for process in self._running if process.popen.poll() is not None]

    def stop(self) -> None:
        """Ends all; by force those that do not end soon, and at once if this is interrupted."""
        end, popens = time.monotonic() + STOP_TIMEOUT, [process.popen for process in self._running]
        try:
            for popen in popens:
                popen.terminate()
            for popen in popens:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    popen.wait(max(0.0, end - time.monotonic()))
        finally:
            for popen in popens:
                if popen.poll() is None:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        for child in psutil.Process(popen.pid).children(recursive=True):  # its engine core
                            child.kill()
                    popen.kill()
                    popen.wait()
            self._running.clear()


# ---------------------------------------------------------------- two hosts

NAMESPACES = {"P": "nanopd-p", "D": "nanopd-d"}
ADDRESSES = {"P": "10.77.0.1", "D": "10.77.0.2", "": "10.77.0.254"}  # "": ours


@contextlib.contextmanager
def two_hosts() -> Iterator[None]:
    """Two network namespaces, which are for the network what two machines are: other interfaces, other addresses.

                    here 10.77.0.254
                  /                  \\            each line is a veth pair: two network cards and a cable. No bridge
        nanopd-p 10.77.0.1 ---- 10.77.0.2 nanopd-d    and no forwarding, so no firewall rule is in the way.

    Raises UserError.
    """
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        raise UserError("--netns needs Linux, root (try sudo) and the program `ip` (Debian: iproute2).")
    with contextlib.ExitStack() as undo:
        for namespace in NAMESPACES.values():
            _ip("netns", "add", namespace)
            undo.callback(_ip, "netns", "del", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
        for one, other in (("P", "D"), ("P", ""), ("D", "")):
            mine, theirs = f"nanopd-{one}-{other or 'us'}".lower(), f"nanopd-{other or 'us'}-{one}".lower()
            there = ("netns", NAMESPACES[other]) if other else ()
            _ip("link", "add", mine, "netns", NAMESPACES[one], "type", "veth", "peer", "name", theirs, *there)
            if not other:
                undo.callback(_ip, "link", "del", theirs)  # with one end goes the other
            for name, end, peer in ((mine, one, other), (theirs, other, one)):
                inside = ("-n", NAMESPACES[end]) if end else ()
                _ip(*inside, "addr", "add", ADDRESSES[end], "peer", ADDRESSES[peer], "dev", name)
                _ip(*inside, "link", "set", name, "up")
        yield


def _ip(*arguments: Any) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        hint = ""
        if "File exists" in done.stderr:
            hint = "\nIs another demo running? If one was killed: `ip netns del nanopd-p; ip netns del nanopd-d`."
        raise UserError(f"`ip {' '.join(arguments)}` failed: {done.stderr.strip()}{hint}")
