"""Runs a program that is not trusted, so that it can neither hang nor harm: for `nanopd grade`.

    outside   a time limit, then everything it has started is killed; namespaces of its own where the system allows it
              (processes: it sees and signals nobody else; network: none; and no capability outside)
    inside    `confine`: limits of memory, files and processes; Landlock (Linux 5.13): it writes into its scratch only

Both need no root. Where a system lacks a part (macOS, an old kernel, some containers), the time and memory limits still
hold, and `isolation` says what does not: then grade strangers' code in a container.
"""

import contextlib
import ctypes
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import psutil

MAX_OUTPUT = 64 * 2**20  # bytes a file may have, standard output among them
MAX_PROCESSES = 200  # threads count too; only in a user namespace do they count by themselves

# From the kernel's <linux/landlock.h>: all rights by which files can be changed, and in which version each came.
_WRITE_FILE, _TRUNCATE, _REFER = 1 << 1, 1 << 14, 1 << 13
_CHANGES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))  # and make or remove anything
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_DEATH_SIGNAL, _CHILD_SUBREAPER, _NO_NEW_PRIVS = 1, 36, 38  # <linux/prctl.h>
_running: set["subprocess.Popen[bytes]"] = set()


@cache
def _namespaces() -> tuple[str, ...]:
    """The beginning of a command that gives a program its own processes and network, as far as this system lets us."""
    flags = "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--net", "--mount-proc"
    if program := shutil.which("unshare"):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if subprocess.run([program, *flags, "true"], capture_output=True, timeout=20).returncode == 0:
                return (program, *flags)
    return ()


def parallel() -> bool:
    """May `run` be called in two threads at a time? Without namespaces it cannot tell their processes apart."""
    return bool(_namespaces())


@cache
def _landlock_version() -> int:
    if sys.platform != "linux":
        return 0
    return max(0, int(ctypes.CDLL(None).syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)))


def isolation() -> str | None:
    """What this system does not give; None: nothing is missing."""
    missing = [] if _namespaces() else ["processes and network of its own"]
    missing += [] if _landlock_version() else ["write protection of files"]
    return " and ".join(missing) or None


def run(command: Sequence[str], seconds: float, scratch: Path, environment: dict[str, str], result_fd: int) -> bool:
    """Runs `command` in `scratch`, which is also its home; its output goes to `scratch`/output.

    Args:
        seconds: after which it is killed, with all that it has started.
        result_fd: stays open in it: the end of a pipe, for what it has to say.

    Returns:
        False if its time was up.
    """
    own = {"HOME": str(scratch), "TMPDIR": str(scratch), "PYTHONDONTWRITEBYTECODE": "1"}
    loose = not _namespaces()  # else all end with the first of them
    if loose and sys.platform == "linux":  # whoever loses its parent becomes our child: so it can be found and killed
        ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with (scratch / "output").open("wb") as output:
        process = subprocess.Popen(
            [*_namespaces(), *command],
            cwd=scratch,
            env=environment | own,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[result_fd],
            start_new_session=True,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        os.close(result_fd)
        _running.add(process)
        try:
            process.wait(seconds)
            return True
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            _running.discard(process)
            while loose and (left := [c for c in psutil.Process().children(recursive=True) if c.pid not in before]):
                for child in left:  # they were started with a session of their own
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
                psutil.wait_procs(left, timeout=1)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)  # else a kill -9 of ours would leave it running


def stop() -> None:
    """Ends all that `run` has started, in whatever thread."""
    for process in list(_running):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def confine(scratch: Path, memory: int) -> None:
    """For this process and all it will start: at most `memory` bytes of address space each, and no file is changed
    outside `scratch`. Cannot be undone."""
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_OUTPUT, MAX_OUTPUT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if os.environ.get("NANOPD_OWN_USERS"):
        resource.setrlimit(resource.RLIMIT_NPROC, (MAX_PROCESSES, MAX_PROCESSES))
    version = _landlock_version()
    if not version:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    rights = _CHANGES | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    handled = struct.pack("Q", rights)
    ruleset = libc.syscall(_CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0)
    for path, allowed in ((scratch, rights), (Path("/dev/null"), _WRITE_FILE)):
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", allowed, handle)
        if libc.syscall(_ADD_RULE, ruleset, 1, rule, 0):
            raise OSError(ctypes.get_errno(), f"Landlock refuses {path}")
        os.close(handle)
    libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.syscall(_RESTRICT_SELF, ruleset, 0):
        raise OSError(ctypes.get_errno(), "Landlock could not be switched on")
    os.close(ruleset)


def own_users() -> dict[str, str]:
    """What to put into the environment of a program that `run` starts, so that `confine` knows how far to go."""
    return {"NANOPD_OWN_USERS": "1"} if _namespaces() else {}
