"""Python programs in processes of their own, without the four seconds of a processor that importing torch takes.

One process imports it and waits. For each program it makes a child: arguments, environment, standard streams and exit code
are its own, and everything but torch is imported anew. That nanopd imports torch no earlier than it needs to is not seen
here; tests/test_size.py looks at that.
"""

import atexit
import gc
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]


def run(
    command: Sequence[str], input: bytes = b"", env: Mapping[str, str] = os.environ, timeout: float = 300.0
) -> "subprocess.CompletedProcess[bytes]":
    """As `subprocess.run([sys.executable, *command], capture_output=True, …)`; `command` begins with -m or a file."""
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        stdin.write(input)
        stdin.seek(0)
        here, there = socket.socketpair()
        what = json.dumps([[str(word) for word in command], dict(env)]).encode()
        socket.send_fds(_server(), [b"x"], [there.fileno(), *(file.fileno() for file in (stdin, stdout, stderr))])
        there.close()
        with here:
            here.settimeout(timeout)
            here.sendall(what)
            here.shutdown(socket.SHUT_WR)
            code = int(here.recv(20))
        for file in stdout, stderr:
            file.seek(0)
        return subprocess.CompletedProcess(command, code, stdout.read(), stderr.read())


@cache
def _server() -> socket.socket:
    """The process that waits, of this process: one for each worker of pytest."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "tests.forked", str(theirs.fileno())]
    process = subprocess.Popen(command, cwd=CHECKOUT, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
    theirs.close()
    atexit.register(process.wait)
    atexit.register(ours.close)  # which ends it; called first
    return ours


def _serve(asked: socket.socket) -> list[str] | None:
    """Makes children until nobody can ask any more. Returns the command in each child, and None in the end."""
    while fds := socket.recv_fds(asked, 1, 4)[1]:
        with socket.socket(fileno=fds[0]) as answer:
            text = b""
            while more := answer.recv(65536):
                text += more
            command, environment = json.loads(text)
            if (pid := os.fork()) == 0:
                asked.close()
                for i, fd in enumerate(fds[1:]):
                    os.dup2(fd, i)
                    os.close(fd)
                os.environ.clear()
                os.environ.update(environment)
                return list(command)
            for fd in fds[1:]:
                os.close(fd)
            answer.sendall(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    return None


if __name__ == "__main__":
    import torch  # noqa: F401

    gc.freeze()  # else each child goes through all of torch's objects when it ends: a second
    if program := _serve(socket.socket(fileno=int(sys.argv[1]))):
        if program[0] == "-m":
            sys.argv = program[1:]
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = program, str(Path(program[0]).parent)
            runpy.run_path(program[0], run_name="__main__")
