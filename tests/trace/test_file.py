"""The file format: what a crash leaves behind, what is refused, and how the traces of P and D come on one clock."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from nanopd.config import UserError
from nanopd.trace.events import Planned, Stepped, Transfer
from nanopd.trace.file import TraceReader, align, read
from tests.core.drive import Driver, make_request, make_scheduler
from tests.trace.record import trace_to


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    scheduler = make_scheduler(num_blocks=7, block_size=4)
    trace_to(tmp_path / "t.jsonl", scheduler)
    for name in "abc":
        scheduler.add_request(make_request(name, prompt=7, max_tokens=6))
    Driver(scheduler).run()
    return tmp_path / "t.jsonl"


def change(path: Path, number: int, **fields: Any) -> None:
    lines = path.read_text().splitlines()
    lines[number] = json.dumps(json.loads(lines[number]) | fields)
    path.write_text("\n".join(lines) + "\n")


def test_a_last_line_cut_short_is_skipped_with_a_warning(trace: Path, caplog: pytest.LogCaptureFixture):
    _, whole = read(trace)
    assert not caplog.records
    for cut in (1, 2, 30):
        data = trace.read_bytes()
        trace.write_bytes(data[:-cut])
        assert read(trace)[1] == whole[:-1]
        assert "cut short" in caplog.text
        caplog.clear()
        trace.write_bytes(data)


def test_everything_is_in_the_file_at_the_end_of_a_step(tmp_path: Path):
    """A process that dies loses nothing but the step it was in."""
    scheduler = make_scheduler()
    trace_to(tmp_path / "t", scheduler)
    scheduler.add_request(make_request("a"))
    driver = Driver(scheduler)
    for step in range(3):
        driver.step()
        _, lines = read(tmp_path / "t")
        assert (lines[-1].step, lines[-1].event) == (step, Stepped())


def test_another_version_is_refused(trace: Path):
    change(trace, 0, version=1)
    with pytest.raises(UserError, match=r"line 1.*version 2.*`\$\.version`"):
        read(trace)


@pytest.mark.parametrize(
    ("number", "fields"),
    [
        (0, {"format": "something else"}),
        (0, {"num_blocks": "many"}),
        (3, {"step": "seven"}),
        (3, {"event": {"type": "Exploded"}}),
        (3, {"event": {"type": "Stepped", "colour": "red"}}),
        (3, {"more": 1}),
    ],
)
def test_what_does_not_fit_is_refused(trace: Path, number: int, fields: dict[str, Any]):
    change(trace, number, **fields)
    with pytest.raises(UserError, match=f"line {number + 1}"):
        read(trace)


@pytest.mark.parametrize("data", [b"", b"hello\n", b"\xff\xfe\n", b"[]\n", b"{}"])
def test_what_is_no_trace_is_refused(tmp_path: Path, data: bytes):
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(UserError, match="not in a nanopd trace"):
        read(tmp_path / "x")


def test_a_line_damaged_in_the_middle_is_refused(trace: Path):
    data = trace.read_bytes().splitlines(keepends=True)
    trace.write_bytes(b"".join([*data[:4], data[4][:20] + b"\n", *data[5:]]))
    with pytest.raises(UserError, match="line 5"):
        read(trace)


def test_a_growing_trace_is_read_as_far_as_it_is(trace: Path, tmp_path: Path):
    data = trace.read_bytes()
    growing = tmp_path / "growing"
    growing.write_bytes(data.splitlines(keepends=True)[0])
    reader, lines = TraceReader(growing), []
    for start in range(len(growing.read_bytes()), len(data), 37):
        with growing.open("ab") as file:
            file.write(data[start : start + 37])
        lines += reader.more()
    assert lines == read(trace)[1]


def test_threads_may_tell_too(tmp_path: Path):
    scheduler = make_scheduler()
    trace_to(tmp_path / "t", scheduler)

    def tell() -> None:
        for n in range(500):
            scheduler.trace(Transfer("a", str(n), "send", "sending"))

    threads = [threading.Thread(target=tell) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        scheduler.trace(Planned([]))
        scheduler.trace(Stepped())
    for thread in threads:
        thread.join()
    scheduler.trace(Stepped())
    _, lines = read(tmp_path / "t")
    assert sum(isinstance(line.event, Transfer) for line in lines) == 2000


@pytest.mark.parametrize("skew", [0.0, 0.004, -300.0, 300.0])
def test_two_clocks_are_made_one_by_the_transfers(tmp_path: Path, skew: float):
    """D's clock is wrong by `skew`. Afterwards D asks before P sends, and P is done before D knows it."""
    P, D = make_scheduler(), make_scheduler()
    trace_to(tmp_path / "p", P)
    trace_to(tmp_path / "d", D)
    told = [(D, "recv", "asked"), (P, "send", "sending"), (P, "send", "done"), (D, "recv", "done")]
    for transfer in ("x", "y"):
        for engine, side, state in told:
            engine.trace(Transfer(transfer, transfer, side, state))
    for engine in (P, D):
        engine.trace(Stepped())
    p, d = read(tmp_path / "p"), read(tmp_path / "d")
    d[0].clock = d[0].clock[0] + skew, d[0].clock[1]
    for traces in ([p, d], [d, p]):
        offsets = align(traces)
        assert offsets[0] == traces[0][0].clock[0] - traces[0][0].clock[1]
        at = {
            (line.event.side, line.event.state, line.event.transfer_id): line.time + offset
            for (_, lines), offset in zip(traces, offsets)
            for line in lines
            if isinstance(line.event, Transfer)
        }
        for transfer in ("x", "y"):
            order = [at[side, state, transfer] for _, side, state in told]
            assert order == sorted(order)
