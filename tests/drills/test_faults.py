"""The seam for faults: each point is a method that is there, nothing is wrapped unless it is asked for, and the matrix of
drills is what it says it is."""

import importlib
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from nanopd import cli
from nanopd.config import EngineConfig, UserError

cli.add_checkout_commands()
faults: Any = importlib.import_module("nanopd_lessons.faults")
drills: Any = importlib.import_module("nanopd_lessons.drills")
SITE = Path(cli.CHECKOUT) / "lessons/faults_site"


@pytest.mark.parametrize("name", faults.POINTS)
def test_each_point_has_its_method(name: str):
    """A method that is renamed takes its point with it, and here it is missed."""
    point = faults.POINTS[name]
    module, method = point.where.split(":")
    owner, attribute = method.split(".")
    original = importlib.import_module(module).__dict__[owner].__dict__[attribute]
    undo = faults.wrap(sys.modules[module], faults.Seam())
    assert sys.modules[module].__dict__[owner].__dict__[attribute].__wrapped__ is original
    undo()
    assert sys.modules[module].__dict__[owner].__dict__[attribute] is original
    assert issubclass(faults._find(point.error), Exception)


def test_a_missing_method_is_told(monkeypatch: pytest.MonkeyPatch):
    module = importlib.import_module("nanopd.serve.router")
    monkeypatch.delattr(module.Router, "attempt")
    with pytest.raises(AttributeError, match=r"has no Router\.attempt, where a fault has its place"):
        faults.wrap(module, faults.Seam())


LOOK = (
    "import nanopd.connector.consumer as c, nanopd.serve.router as r, sys; "
    "sys.exit(10 + hasattr(c.Consumer._send, '__wrapped__') + hasattr(r.Router.attempt, '__wrapped__'))"
)


@pytest.mark.parametrize("on", [False, True])
def test_it_is_off_unless_asked_for(tmp_path: Path, on: bool):
    """Neither the folder alone nor an engine in its usual environment wraps anything."""
    environment = {k: v for k, v in os.environ.items() if k != faults.FILE}
    environment["PYTHONPATH"] = os.pathsep.join([str(SITE), *sys.path])
    if on:
        (tmp_path / "faults.json").write_text("[]")
        environment[faults.FILE] = str(tmp_path / "faults.json")
    assert subprocess.run([sys.executable, "-c", LOOK], env=environment).returncode == (12 if on else 10)


def test_armed_while_it_runs(tmp_path: Path):
    """Another file, other faults: counted from then on; each firing is in the log before it acts."""
    file = tmp_path / "faults.json"
    file.write_text("[]")
    seam = faults.Seam(file, "P")
    calls: list[Any] = []
    assert seam.run(["prefill"], calls.append, 1) is None and calls == [1]

    def core(running: bool) -> Any:
        return type("Core", (), {"scheduler": type("Scheduler", (), {"running": running})})

    def arm(text: str) -> None:
        file.write_text(text)
        os.utime(file, ns=(0, int(file.stat().st_mtime_ns) + 10**9))

    arm(
        '[{"id": "a", "node": "P", "point": "prefill", "kind": "drop", "skip": 1, "times": 2},'
        ' {"id": "b", "node": "D", "point": "prefill", "kind": "drop"}]'
    )
    for i, running in enumerate([True, False, True, True, True]):
        seam.run(["prefill"], lambda core, i=i: calls.append(i), core(running))
    assert calls == [1, 0, 1, 4] and seam.fired == [("prefill", "drop")] * 2
    assert len((tmp_path / "faults.log").read_text().splitlines()) == 2
    arm('[{"id": "c", "node": "P", "point": "prefill", "kind": "error"}]')
    with pytest.raises(RuntimeError, match="a fault on purpose: when P computes prompts"):
        seam.run(["prefill"], calls.append, core(True))
    seam.run(["prefill"], calls.append, core(True))
    assert len(calls) == 5


# ---------------------------------------------------------------- the matrix


def test_the_matrix():
    """At least forty cells; each names a point and a fault that exist, and says what one sees."""
    cells = drills.CELLS
    assert len(cells) >= 40 and len({cell.name for cell in cells}) == len(cells)
    for cell in cells:
        assert cell.point in faults.POINTS and drills.FAULTS[cell.fault].kind in faults.KINDS and len(cell.see) > 10
    assert {cell.fault for cell in cells} == set(drills.FAULTS)
    assert {cell.point for cell in cells} == set(faults.POINTS) - {"cancel", "failed"}  # those: test_cells.py


def test_names():
    assert drills.find("all") == drills.CELLS
    assert [cell.name for cell in drills.find("done.drop")] == ["done.drop"]
    assert {cell.point for cell in drills.find("decode")} == {"decode"} and len(drills.find("decode")) > 5
    with pytest.raises(UserError, match=r"no drill 'done.drip'. Did you mean done.drop .* a point .*--drill list"):
        drills.find("done.drip")


def test_the_command():
    """An unknown name is the user's mistake; the list needs no engine."""
    command = [sys.executable, "-m", "nanopd", "pd-demo", "--drill"]
    done = subprocess.run([*command, "nope"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("Error: There is no drill 'nope'") and not done.stdout
    done = subprocess.run([*command, "list"], capture_output=True, text=True, env=os.environ | {"COLUMNS": "250"})
    assert done.returncode == 0 and all(cell.name in done.stdout for cell in drills.CELLS)


def test_what_is_bad_is_told():
    """A verdict on each way to fail, so that a drill cannot pass by seeing nothing."""
    (cell,) = drills.find("done.drop")

    def verdict(**changes: Any) -> Any:
        fields = {"right": 8, "fired": 1, "after": 16, "said": {"D": ["something"]}} | changes
        v = drills.Verdict(cell, **fields)
        drills.Drills._judge(v)
        return v.problems

    assert verdict() == []
    assert verdict(fired=0) == ["the fault never fired"]
    assert verdict(right=7, hung=1) == ["1 requests hung"]
    assert verdict(right=7, wrong=1) == ["1 requests got wrong tokens"]
    assert verdict(right=7, errored=1) == ["1 requests failed"]
    assert verdict(leaked=3) == ["3 blocks leaked"]
    assert verdict(after=15) == ["1 of 16 more were not right"]
    assert verdict(right=7) == ["some requests have no verdict"]
    assert verdict(said={"D": []}) == ["nobody said a word"]
    console = Console(file=io.StringIO(), width=200)
    drills.print_verdicts([drills.Verdict(cell, right=8)], console)
    assert "0 of" not in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_small_model_is_read_like_any_other(tmp_path: Path):
    from nanopd import LLM, SamplingParams

    drive = importlib.import_module("nanopd_lessons.drive")
    model = drive.byte_tokenizer(drive.tiny_model(tmp_path / "tiny", 3, tied=False))
    llm = LLM(str(model), num_blocks=50, dtype="float32")
    prompts = [[1, 2, 3], [3, 2, 1]]
    answers = [o.outputs[0].token_ids for o in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8))]
    assert answers[0] != answers[1] and EngineConfig().model is None
