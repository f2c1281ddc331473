"""The exercises give the points they should, and whoever hands in what is hostile gets none and does no harm."""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from nanopd_lessons import course, grading
from nanopd_lessons.course import Lesson

LESSONS = course.lessons()
each_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.path.name)


@each_lesson
def test_exercises_give_the_points_they_should(lesson: Lesson, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The stub says what is missing, the solution gets everything, and each of at least 5 wrong ones loses points."""
    monkeypatch.setenv("NANOPD_LESSON_MODEL", "tiny")
    wrong = importlib.import_module(f"tests.lessons.wrong.lesson_{lesson.number:02}").WRONG
    assert len(wrong) >= 5
    solution = (lesson.path / "solution.py").read_text()
    files = [lesson.path / "exercise.py", lesson.path / "solution.py", lesson.path / "solution.py"]
    for i, (name, replacements) in enumerate(wrong.items()):
        source = solution
        for old, new in replacements:
            assert source.count(old) == 1, f"{name}: {old!r} occurs {source.count(old)} times"
            source = source.replace(old, new)
        files.append(tmp_path / f"wrong_{i}.py")
        files[-1].write_text(source)
    cases = grading.cases_of(lesson.path)
    assert len(cases) >= 4 and all(one.hint and one.title != one.name for one in cases)
    stub, expected, again = grading.run_cases(lesson, files[:3], 1, cases, grading.PATIENCE)
    answers = grading.run_cases(lesson, files[3:], seed=1, cases=cases, seconds=4)  # some loop
    for one in cases:
        problem = grading.judge(again[one.name], expected[one.name])
        assert problem is None, f"the solution is not the same twice: {one.name}: {problem}"
    problems = [grading.judge(stub[one.name], expected[one.name]) for one in cases]
    assert all(problems), f"the stub passes {[one.name for one, p in zip(cases, problems) if not p]}"
    assert any("not written yet" in str(problem) for problem in problems)
    for name, answer in zip(wrong, answers):
        lost = [one for one in cases if grading.judge(answer[one.name], expected[one.name])]
        assert lost, f"{name!r} gets full marks"


def test_grade_on_the_command_line(tmp_path: Path):
    """Full marks with the default or a tiny model, exit code 0; results for Gradescope; a mistake is exit code 1 or 2."""
    solution = course.find("3").path / "solution.py"
    command = [sys.executable, "-m", "nanopd", "grade", "03"]
    environment = os.environ | {"NANOPD_LESSON_MODEL": "tiny"}

    def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
        words = [*command, *map(str, arguments)]
        return subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment)

    done = run(solution, "--json", "--seed", 5, "--gradescope", tmp_path / "results.json")
    assert done.returncode == 0, done.stdout + done.stderr
    *cases, summary = map(json.loads, done.stdout.splitlines())
    assert summary["points"] == summary["of"] == sum(one["points"] for one in cases) > 10
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["score"] == summary["of"] and all(
        t["status"] == "passed" and t["max_score"] for t in results["tests"]
    )

    (tmp_path / "mine.py").write_text(solution.read_text().replace("self.free_queue.append(freed)", "pass"))
    done = run(tmp_path / "mine.py", "--gradescope", tmp_path / "results.json")
    assert done.returncode == 1 and "Hint:" in done.stdout and "free queue" in done.stdout
    results = json.loads((tmp_path / "results.json").read_text())
    assert 0 < results["score"] < summary["of"] and any(
        t["status"] == "failed" and t["output"] for t in results["tests"]
    )

    mistakes = [(("none.py",), "no file"), ((tmp_path,), "regular file"), (("--seed", "-1", solution), "seed")]
    mistakes += [((solution, "--gradescope", tmp_path / "none" / "results.json"), "cannot be written")]
    for arguments, said in mistakes:
        done = run(*arguments)
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


SMALL_LESSON = {
    "exercise.py": "from random import Random\ndef answer(n): raise NotImplementedError('answer')\n",
    "solution.py": "def answer(n): return n + 1\n",
    "test_exercise.py": """
from nanopd_lessons.grading import case
@case(points=2, hint="count")
def test_one(student, random):
    return {"answer": student.answer(random.randint(1, 10**9))}
@case(points=1, hint="count")
def test_free(student, random):
    return [student.answer(i) for i in range(3)]
""",
}


def marks_of(tmp_path: Path, source: str) -> list[grading.Mark]:
    """What somebody's file gets in a lesson made for this."""
    lesson = Lesson(99, tmp_path / "99_small")
    lesson.path.mkdir()
    for name, text in SMALL_LESSON.items():
        (lesson.path / name).write_text(text)
    (tmp_path / "mine.py").write_text(source)
    return grading.grade(lesson, tmp_path / "mine.py", seed=3, seconds=2)


def test_a_childs_child_holds_nobody_up(tmp_path: Path):
    """It holds the pipe, too; but the case's own process has ended, and has said its result."""
    source = "import os, time\nif os.fork() == 0:\n    time.sleep(60)\n    os._exit(0)\n" + SMALL_LESSON["solution.py"]
    assert [mark.points for mark in marks_of(tmp_path, source)] == [2, 1]


def test_what_a_submission_says_is_harmless(tmp_path: Path):
    source = "def answer(n): raise SystemExit('\\x1b[2J\\x1b]0;title\\x07 \\u202e\\r right')"
    for mark in marks_of(tmp_path, source):
        assert r"\x1b[2J" in str(mark.problem) and not {"\x1b", "\x07", "\u202e", "\r"} & set(str(mark.problem))


def command_of(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whoever_stops_the_grader_stops_everything(number: signal.Signals, tmp_path: Path):
    file = tmp_path / "loops.py"
    file.write_text((course.find("15").path / "solution.py").read_text() + "\nwhile True: pass\n")  # it needs no torch
    process = subprocess.Popen(
        [sys.executable, "-m", "nanopd", "grade", "15", file], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    me, end, below = psutil.Process(process.pid), time.monotonic() + 60, list[psutil.Process]()
    # Until a case plays it: the case's process, the sandbox's, and that which has made the namespaces.
    while sum(str(file) in command_of(one) for one in below) < (3 if grading.sandbox.parallel() else 2):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.05)
        below = me.children(recursive=True)
    process.send_signal(number)
    said = process.communicate(timeout=20)[1].decode()
    assert process.returncode == (-9 if number == signal.SIGKILL else 130) and "Traceback" not in said
    assert not psutil.wait_procs(below, timeout=10)[1]


def test_the_small_lesson_can_be_passed(tmp_path: Path):
    assert [mark.points for mark in marks_of(tmp_path, SMALL_LESSON["solution.py"])] == [2, 1]


HOSTILE = {
    "loops": "while True: pass",
    "loops and cannot be stopped": """
import signal
for number in (14, 15):
    signal.signal(number, signal.SIG_IGN)
while True:
    try:
        while True: pass
    except BaseException: pass
""",
    "ends the process": "import os; os._exit(0)",
    "raises SystemExit": "raise SystemExit(0)",
    "eats memory": "x = [bytearray(2**28) for _ in range(1000)]",
    "recurses": "def f(): f()\nf()",
    "floods the output": "while True: print('x' * 10**6)",
    "is not Python": "def (",
    "is binary": "\x00\x01",
    "patches the grader": """
import sys
for module in list(sys.modules.values()):
    for name in ("difference", "judge", "_try", "_play"):
        if hasattr(module, name): setattr(module, name, lambda *a: {"data": {}})
""",
    "writes results itself": """
import os
for fd in range(3, 30):
    try: os.write(fd, b'{"file": 0, "case": "test_free", "data": {}}\\n')
    except OSError: pass
""",
    "imports the answer": "from nanopd.core.block_pool import BlockPool\ndef answer(n): return n + 1",
    "is empty": "",
    "returns what cannot be compared": "def answer(n): return 10**400",
    "returns what is too deep": """
def answer(n):
    x = []
    for _ in range(100_000): x = [x]
    return x
""",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_submissions_get_nothing(name: str, tmp_path: Path):
    """... and take no longer than the cases' limits, here two seconds each."""
    source = HOSTILE[name]
    if "def answer" not in source and name not in ("is empty", "is not Python", "is binary"):
        source += "\ndef answer(n): return None\n"  # else nobody would even run it
    marks = marks_of(tmp_path, source)
    assert marks and all(mark.points == 0 and mark.problem for mark in marks)


@pytest.mark.skipif(grading.sandbox.isolation() is not None, reason="this system has no namespaces or no Landlock")
def test_a_submission_reaches_nothing_outside(tmp_path: Path):
    """It cannot write outside its scratch, signal the grader, see processes, use the network, or leave anything behind."""
    victim = tmp_path / "victim.txt"
    victim.write_text("whole")
    target = tmp_path / "99_small"
    marks = marks_of(
        tmp_path,
        f"""
import os, socket, subprocess, sys
found = []
def attempt(what, do):
    try: do(); found.append(what)
    except BaseException: pass
attempt("write a file", lambda: open({str(victim)!r}, "w"))
attempt("change the grader", lambda: open({str(target / "test_exercise.py")!r}, "a"))
attempt("make a file", lambda: open({str(tmp_path / "new")!r}, "w"))
attempt("delete", lambda: os.unlink({str(victim)!r}))
attempt("rename", lambda: os.rename({str(victim)!r}, {str(tmp_path / "other")!r}))
attempt("kill the grader", lambda: os.kill({os.getpid()}, 0))
attempt("network", lambda: socket.create_connection(("127.0.0.1", 22), 1))
attempt("see processes", lambda: [os.kill(int(p), 0) for p in os.listdir("/proc") if p.isdigit() and int(p) > 300][0])
open(os.path.join(os.environ["HOME"], "own"), "w").write("its own scratch")
subprocess.Popen([sys.executable, "-c", "import os, time\\nos.setsid()\\ntime.sleep(4321)"])
raise RuntimeError("reached: " + ", ".join(found))
def answer(n): pass
""",
    )
    for mark in marks:
        assert "RuntimeError: reached: ," in str(mark.problem), mark.problem
    assert victim.read_text() == "whole"
    left = subprocess.run(["pgrep", "-f", "sleep.4321"], capture_output=True, text=True).stdout
    assert not left.strip(), left
