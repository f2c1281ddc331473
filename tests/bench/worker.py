"""Another process that takes turns at work: a line of JSON there, a line back. For `bench peers` and `bench scheduler`."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nanopd import OPENMP, UserError


class Worker:
    """An engine in another process: `turn` gives it work and waits for the answer."""

    def __init__(self, python: str, script: Path, *args: str, env: dict[str, str], log: Path) -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that it ends with us
        with log.open("w") as err:
            self._process = subprocess.Popen(
                [python, "-P", str(script), *args],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                env=env,
                text=True,
                start_new_session=True,
            )
        self._log, self.what = log, ""

    def wait_until_loaded(self) -> None:
        """From then on `what` says what it is."""
        self.what = str(self._answer()["engine"])

    def turn(self, work: dict[str, Any]) -> dict[str, Any]:
        """One line there, one line back. Raises UserError with the last line of its log if it has died."""
        assert self._process.stdin
        with suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write(json.dumps(work) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        if not (line := self._process.stdout.readline()):
            self.close()
            last = self._log.read_text().strip().rpartition("\n")[2]
            raise UserError(f"A peer has died: {last} ({self._log} says more).")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """It, and all that it has started."""
        assert self._process.stdin
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
        finally:  # whoever does not want to wait for that and sends another signal must not leave it behind
            with suppress(ProcessLookupError):  # vLLM leaves some of its processes behind
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@contextmanager
def started(python: str, script: str, name: str, options: str, env: dict[str, str], logs: Path) -> Iterator[Worker]:
    """`script` of this folder, run by `python`; what it says on standard error is kept in `logs`. Ended at the end.

    Other engines get the environment as the user has it, without what this package says to OpenMP for itself.
    """
    env = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | env
    env["PYTHONPATH"] = str(Path(__file__).parents[2]) if name == "nanopd" else ""
    left = {key: value for key, value in os.environ.items() if name == "nanopd" or OPENMP.get(key) != value}
    path = Path(__file__).with_name(script)
    if not shutil.which(python):
        raise UserError(f"--peer-python is {python!r}; there is no such program.")
    worker = Worker(python, path, name, options, env=left | env, log=logs / f"{path.stem}-{name}.log")
    try:
        worker.wait_until_loaded()
        yield worker
    finally:
        worker.close()
