"""`--trace` and `nanopd trace`, as their users see them: real processes, a terminal, files."""

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from nanopd.config import SamplingParams
from nanopd.request import Request
from nanopd.trace.export import perfetto
from nanopd.trace.file import read
from nanopd.trace.replay import State, replay
from nanopd.trace.show import frame
from tests.cli.test_cli import nanopd
from tests.connector.pair import Node, run
from tests.core.drive import Driver, make_request, make_scheduler
from tests.engine.conftest import tiny_model
from tests.trace.compare import of_engine, of_replay
from tests.trace.record import trace_to

__all__ = ["tiny_model"]  # a fixture


@pytest.fixture(scope="module")
def traced(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `nanopd generate --trace` wrote, in a pool that is too small."""
    path = tmp_path_factory.mktemp("cli") / "run.jsonl"
    options = ["--model", str(tiny_model), "--dtype", "float32", "--num-blocks", "9", "--block-size", "4"]
    done = nanopd(
        "generate", *options, "--ignore-eos", "--max-tokens", "12", "--trace", str(path), "one", "two", "three"
    )
    assert done.returncode == 0
    return path


def test_generate_writes_a_trace(traced: Path, tiny_model: Path):
    header, lines = read(traced)
    assert (header.model, header.num_blocks, header.config.block_size) == (str(tiny_model), 9, 4)
    assert header.strides == {"layer": 9 * 2 * 512, "kv": 9 * 512, "block": 512, "slot": 128, "head": 64}
    names = [type(line.event).__name__ for line in lines]
    assert names.count("Arrived") == 3
    assert names[-1] == "Stepped"


def test_show_without_a_terminal_prints_all_events(traced: Path):
    done = nanopd("trace", "show", str(traced))
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == len(read(traced)[1])
    assert "Moved request_id='2' status='preempted' rule='S3 case " in done.stdout


def in_terminal(command: Sequence[str], keys: Sequence[str]) -> str:
    """Runs a command in a terminal, presses keys one by one, and returns all it wrote."""
    controller, terminal = pty.openpty()
    environment = os.environ | {"COLUMNS": "140", "LINES": "50", "TERM": "xterm"}
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    out = b""

    def take(seconds: float) -> None:
        nonlocal out
        quiet = time.monotonic() + seconds
        while time.monotonic() < quiet and select.select([controller], [], [], max(0.0, quiet - time.monotonic()))[0]:
            try:
                out += os.read(controller, 65536)
            except OSError:  # the terminal is gone
                return
            quiet = min(quiet, time.monotonic() + 0.5)

    take(30)
    for key in keys:
        os.write(controller, key.encode())
        take(5)
    assert process.wait(20) == 0
    os.close(controller)
    return out.decode()


def test_show_in_a_terminal_goes_by_keys(traced: Path):
    last = read(traced)[1][-1].step
    keys = ["\x1b[C", " ", "\x1b[D", "G", "g", "p", "q"]
    out = in_terminal([sys.executable, "-m", "nanopd", "trace", "show", str(traced)], keys)
    seen = [int(text.split()[0]) for text in out.split("step ")[1:] if text[:1].isdigit()]
    preempted = next(x.step for x in read(traced)[1] if getattr(x.event, "status", "") == "preempted")
    assert seen == [0, 1, 2, 1, last, 0, preempted, preempted][: len(seen)]
    assert seen[-1] == preempted
    for text in ("waiting", "running", "free queue", "hash table", "S3 case", "S4"):
        assert text in out


def test_show_follows_a_trace_that_grows(tmp_path: Path):
    scheduler = make_scheduler(num_blocks=9)
    trace_to(tmp_path / "t", scheduler)
    command = [sys.executable, "-m", "nanopd", "trace", "show", "--follow", str(tmp_path / "t")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        scheduler.add_request(make_request("late"))
        Driver(scheduler).run()
        assert process.stdout
        lines = iter(process.stdout.readline, "")
        assert any("Arrived request_id='late'" in line for line in lines)
        assert any("status='length'" in line for line in lines)
    finally:
        process.kill()
        process.wait()


def test_html_and_perfetto_write_files(traced: Path, tmp_path: Path):
    done = nanopd("trace", "html", str(traced))
    page = traced.with_suffix(".html").read_text()
    assert done.stdout == f"{traced.with_suffix('.html')}\n"
    assert "/*TRACES*/" not in page
    assert "://" not in page
    done = nanopd("trace", "perfetto", str(traced), "-o", str(tmp_path / "x.json"))
    assert done.returncode == 0
    assert json.loads((tmp_path / "x.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["draw", "{trace}"], "It is trace show FILE"),
        (["show", "{trace}", "{trace}"], "It is trace show FILE"),
        (["html", "--follow", "{trace}"], "It is trace show FILE"),
        (["html", "{trace}.no"], "No such file"),
        (["show", "/dev/null"], "not in a nanopd trace"),
    ],
)
def test_mistakes_get_a_sentence_and_exit_code_2(args: list[str], says: str, traced: Path):
    done = nanopd("trace", *(arg.format(trace=traced) for arg in args))
    assert done.returncode == 2
    assert says in done.stderr


def check_slices(events: list[dict[str, Any]]) -> None:
    """What Perfetto asks of a trace: slices of a track do not overlap, arrows start and end inside one."""
    slices = [e for e in events if e["ph"] == "X"]
    for track in {(e["pid"], e["tid"]) for e in slices}:
        ends = 0.0
        for e in sorted((e for e in slices if (e["pid"], e["tid"]) == track), key=lambda e: e["ts"]):
            assert e["dur"] >= 0
            assert e["ts"] >= ends - 0.5
            ends = e["ts"] + e["dur"]
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] in "XsfC"} <= named
    for e in (e for e in events if e["ph"] in "sf"):
        around = [s for s in slices if (s["pid"], s["tid"]) == (e["pid"], e["tid"])]
        assert any(s["ts"] - 0.5 <= e["ts"] <= s["ts"] + s["dur"] + 0.5 for s in around)


def test_perfetto_has_a_track_for_each_request(traced: Path):
    events = json.loads(perfetto([traced]))["traceEvents"]
    check_slices(events)
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {"steps", "request 0", "request 1", "request 2"}
    assert {"waiting", "running", "preempted"} <= {e["name"] for e in events if e["ph"] == "X"}


@pytest.fixture
def session(tmp_path: Path) -> Path:
    """S's second input comes early; A takes the blocks of the idle session; B waits for A's seat."""
    scheduler = make_scheduler(num_blocks=6, block_size=4, max_num_batched_tokens=9)
    trace_to(tmp_path / "session.jsonl", scheduler)
    driver = Driver(scheduler)
    for turn, tokens in ((0, 9), (1, 4)):
        scheduler.add_request(Request("S", range(tokens), SamplingParams(max_tokens=3, seed=0), [2], turn=turn))
        driver.step()
    driver.run()
    scheduler.add_request(make_request("A", prompt=9, max_tokens=2))
    scheduler.add_request(make_request("B", prompt=2, max_tokens=1))
    driver.run()
    return tmp_path / "session.jsonl"


def test_perfetto_has_the_states_of_a_session(session: Path):
    events = json.loads(perfetto([session]))["traceEvents"]
    check_slices(events)
    (track,) = (e["tid"] for e in events if e["ph"] == "M" and e["args"]["name"] == "request S")
    states = [e["name"] for e in events if e["ph"] == "X" and e["tid"] == track]
    turn = ["waiting", "running", "waiting for input"]
    assert states == [*turn, *turn, "waiting for input"], (
        "further input that comes early begins nothing; S13: no blocks"
    )


def test_show_has_a_column_for_idle_sessions_where_there_are_any(session: Path):
    header, lines = read(session)
    shown = []
    for step, happened, state in replay(header, lines):
        console = Console(width=180, record=True, file=io.StringIO())
        console.print(frame(header, step, happened, state, 9))
        shown.append(console.export_text())
        assert "\n┏━" in shown[-1], "the table begins on a line of its own"
        assert ("idle" in shown[-1].split("free queue")[0]) == bool(state.idle)
        if "request_id='S' status='waiting for input' rule" in shown[-1]:
            row = r"B 0/2 waiting S2 budget +│ +│ A 9/10 running \+9 +│ S 0/\d+ waiting for input S13"
            assert re.search(row, shown[-1]), "A has got its blocks: nobody waits behind it"
    assert "S 10/11 running +input +1" in shown[1]
    assert re.search(r"S 0/\d+ waiting for input +│ B", shown[-1]), (
        "a session that waits is kept by no rule from going on"
    )


def test_p_and_d_of_one_run(tiny_model: Path, tmp_path: Path):
    """Real engines, the real Mooncake: each trace replays to its engine's state, and together they make one picture."""
    pytest.importorskip("mooncake.engine")
    p = Node(tiny_model, "prefill", trace=str(tmp_path / "p"))
    d = Node(tiny_model, "decode", trace=str(tmp_path / "d"))
    try:
        for n in range(4):
            prompt = [97 + n, *range(100, 112 + n)]
            p.prefill(f"r{n}", prompt)
            d.decode(f"r{n}", prompt, p)
        run(p, d)
    finally:
        for node in (p, d):
            node.core.close()
    for name, node in (("p", p), ("d", d)):
        header, lines = read(tmp_path / name)
        assert header.role == {"p": "prefill", "d": "decode"}[name]
        state = State(header)
        for line in lines:
            state.apply(line.event)
        assert of_replay(state) == of_engine(node.core.scheduler)
    events = json.loads(perfetto([tmp_path / "p", tmp_path / "d"]))["traceEvents"]
    check_slices(events)
    arrows = {kind: {e["id"]: e["ts"] for e in events if e["ph"] == kind} for kind in "sf"}
    assert arrows["s"].keys() == arrows["f"].keys() == {"r0", "r1", "r2", "r3"}
    assert all(arrows["s"][i] < arrows["f"][i] for i in arrows["s"])
