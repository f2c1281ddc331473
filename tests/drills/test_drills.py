"""The drills themselves, with real processes: some of them here, all in the slow one (and in `make drills`)."""

import asyncio
import importlib
import json
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from nanopd import cli
from nanopd.config import EngineConfig

cli.add_checkout_commands()
drills: Any = importlib.import_module("nanopd_lessons.drills")

# One of each sort: the engine's own end of requests, a write that fails, a message twice, clients that go, a node that
# stands still, one that dies and has to be started again, and last one that is not.
SOME = ["prefill.abort-p", "middle-of-write.error", "done.duplicate", "after-pull.clients-leave", "decode.freeze-d"]
SOME += ["middle-of-write.kill-p", "decode.kill-d-core"]


def run(names: list[str]) -> list[Any]:
    async def main() -> list[Any]:
        async with drills.Range(Console(quiet=True)) as range:
            all_of_them = drills.Drills(range, Console(quiet=True))
            await all_of_them.ask_alone()
            return [await all_of_them.run(drills.find(name)[0]) for name in names]

    return asyncio.run(main())


def check(verdicts: list[Any]) -> None:
    rows = [verdict.row() for verdict in verdicts]
    for row in rows:
        print(json.dumps(row))
    assert not [row for row in rows if not row["ok"]]


def test_some_drills():
    verdicts = run(SOME)
    check(verdicts)
    by_name = {v.cell.name: v for v in verdicts}
    assert by_name["decode.freeze-d"].seconds > 1.5, "it did stand still"
    assert by_name["decode.kill-d-core"].errored >= 4
    # What README says an operator sees.
    assert any("the prefill was aborted" in line for line in by_name["prefill.abort-p"].said["D"])
    assert any("no KV blocks from" in line for line in by_name["middle-of-write.kill-p"].said["D"])
    assert any("is down and gets no requests" in line for line in by_name["middle-of-write.kill-p"].said["router"])
    assert any("the engine core has died" in line for line in by_name["decode.kill-d-core"].said["D"])
    assert by_name["middle-of-write.error"].moved["P kv_transfer_send_failures_total"] == 1
    assert by_name["middle-of-write.error"].moved["D kv_transfer_receive_failures_total"] == 1


def test_the_command_alone():
    """One drill by its name: rows on standard output, the story on the other; exit code 0."""
    command = [sys.executable, "-m", "nanopd", "pd-demo", "--drill", "before-write.error", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert row.keys() >= {"drill", "right", "errored", "hung", "leaked", "seconds"}
    assert (row["drill"], row["right"], row["hung"], row["leaked"], row["ok"]) == ("before-write.error", 8, 0, 0, True)
    assert "a fault on purpose: when P is about to write into D's memory" in done.stderr
    assert "What each side knew of each transfer:" in done.stderr and "sending -> " in done.stderr
    assert "D kv_transfer_receive_failures_total +1" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_drills():
    check(run([cell.name for cell in drills.CELLS]))
    assert EngineConfig().model is None
