"""`nanopd grade`: runs an exercise's cases against somebody's file, and gives points.

A *case* is a function in a lesson's test_exercise.py. It drives the given module, often inside the real engine, and
returns what came of it: plain data. The reference solution goes through the same cases, with the same random numbers, in
another process; equal data gets the points.

    this process            knows the points; runs no code of the student's
      |-- run_cases --> student's file    in a sandbox: each case in a process of its own, killed when its time is up
      '-- run_cases --> solution.py       the same

So the code that is graded cannot touch the grader: it is never in its process, it can write nowhere but into its scratch,
and it is not told the data that is expected. But the engine's own classes are in its process and the solution is in the
repository: whoever wants to cheat can use those. That is for people to see.
"""

import ast
import contextlib
import functools
import importlib.util
import inspect
import json
import math
import os
import random
import secrets
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from nanopd.config import UserError

from . import sandbox
from .course import Lesson
from .show import console

MEMORY = 6 * 2**30  # bytes of address space; an imported torch takes almost 2
MAX_RESULT = 2**20  # bytes that a case may return
MAX_SOURCE = 2**20  # bytes of a file to grade
MOST_LATE = 2  # cases that run out of time, then the others are not played: nobody likes to wait for loops
PATIENCE = 300.0  # seconds for a case of the reference solution: a busy machine is nobody's mistake
LOADING = 60.0  # seconds to import a lesson's cases, and torch where they need it


@dataclass(frozen=True)
class Case:
    """One test of an exercise. `hint`: what to think about when it fails; it must not give the solution away."""

    name: str
    title: str
    points: int
    hint: str
    seconds: float
    play: Callable[[ModuleType, random.Random], Any]


def case(points: int = 1, hint: str = "", seconds: float = 20.0) -> Callable[[Callable[..., Any]], Callable[[], None]]:
    """Makes a case of a function `(student, random) -> data`, and a test for pytest that holds exercise.py (or the file
    that $NANOPD_SUBMISSION names) against solution.py. Its docstring is the title."""

    def make(play: Callable[..., Any]) -> Callable[[], None]:
        here = Path(inspect.getfile(play)).parent

        def test() -> None:
            seed, file = secrets.randbits(32), os.environ.get("NANOPD_SUBMISSION") or here / "exercise.py"
            got, expected = (_plain(play(load(Path(f)), random.Random(seed))) for f in (file, here / "solution.py"))
            found = difference(got, expected)
            assert found is None, f"{found}. {hint}"

        test.__doc__, test.__name__ = play.__doc__, play.__name__
        title = (play.__doc__ or play.__name__).strip().partition("\n")[0].rstrip(".")
        test.case = Case(play.__name__, title, points, hint, seconds, play)  # type: ignore[attr-defined]
        return test

    return make


def load(file: Path) -> ModuleType:
    """Imports a Python file, each time anew."""
    spec = importlib.util.spec_from_file_location(f"submission_{file.stem}", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module


def cases_of(directory: Path) -> list[Case]:
    """The cases of a lesson, in the order of its file."""
    names = vars(load(directory / "test_exercise.py")).values()
    return [value.case for value in names if isinstance(getattr(value, "case", None), Case)]


def _plain(data: Any) -> Any:
    """As JSON would have it: no tuples, no sets, no objects."""
    return json.loads(msgspec.json.encode(data))


def difference(got: Any, expected: Any, where: str = "") -> str | None:
    """The first place where two results differ, in words; None: they are equal. Floats may differ by rounding."""
    if isinstance(got, dict) and isinstance(expected, dict):
        for key in [*expected, *(k for k in got if k not in expected)]:
            name = f"{where}, {key}" if where else key
            if key not in got or key not in expected:
                return f"{name}: " + ("it is missing" if key not in got else "it should not be there")
            if found := difference(got[key], expected[key], name):
                return found
        return None
    if isinstance(got, list) and isinstance(expected, list) and len(got) == len(expected):
        places = [difference(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(got, expected))]
        if not any(isinstance(item, (dict, list)) for item in expected):
            return f"{where}: {_short(got)}, and it should be {_short(expected)}" if any(places) else None
        return next(filter(None, places), None)
    numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (got, expected))
    if got == expected or (numbers and math.isclose(got, expected, rel_tol=1e-4, abs_tol=1e-5)):
        return None
    return f"{where or 'the result'}: {_short(got)}, and it should be {_short(expected)}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:200]} …"


# ---------------------------------------------------------------- in the sandbox


def main(directory: str, scratch: str, seed: str, seconds: str, result_fd: str, *files: str) -> None:
    """Plays all cases with each file; writes a line of JSON for each: number of the file, case, data or what went wrong.

    A case is played in a fork: what it does to the modules, or how it dies, is nothing to the next.
    """
    out = int(result_fd)
    sys.argv[1:] = []  # no need to tell everybody
    sys.path.insert(0, directory)  # for modules that a lesson's files share
    cases = cases_of(Path(directory))
    if any(one.play.__globals__.get("generate") for one in cases):
        import nanopd.engine.core  # noqa: F401 (once for all cases: torch takes seconds)
    sandbox.confine(Path(scratch), MEMORY)
    os.write(out, b'{"ready": true}\n')
    for number, file in enumerate(files):
        late = 0
        for one in cases:
            if late == MOST_LATE:
                answer: dict[str, Any] = {
                    "error": f"not played, since {late} cases before it were not finished in time"
                }
            else:
                answer = _play(one, Path(file), int(seed), float(seconds) or one.seconds, out)
                late += answer.get("error", "").startswith("not finished")
            answer |= {"file": number, "case": one.name}
            view = memoryview(msgspec.json.encode(answer) + b"\n")
            while view:
                view = view[os.write(out, view) :]


def _play(one: Case, file: Path, seed: int, seconds: float, result_fd: int) -> dict[str, Any]:
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(reading)
        os.close(result_fd)  # what it has to say goes through us
        with contextlib.suppress(BaseException):
            os.setsid()
            result = _try(one, file, seed)
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(msgspec.json.encode(result))
        os._exit(0)
    os.close(writing)
    data, end, status = b"", time.monotonic() + seconds, None
    while (left := end - time.monotonic()) > 0 and len(data) <= MAX_RESULT:
        if select.select([reading], [], [], 0 if status is not None else min(left, 0.05))[0]:
            if not (more := os.read(reading, 65536)):
                break
            data += more
        elif status is not None:
            break  # it has ended; somebody that it started may still hold the pipe
        elif (ended := os.waitpid(pid, os.WNOHANG))[0]:
            status = ended[1]
    os.close(reading)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1] if status is None else status
    if left <= 0:
        return {"error": f"not finished after {seconds:.0f} s: does it loop?"}
    with contextlib.suppress(msgspec.DecodeError):
        return dict(msgspec.json.decode(data, type=dict[str, Any]))
    killed = f", killed by {signal.Signals(os.WTERMSIG(status)).name}" if os.WIFSIGNALED(status) else ""
    return {"error": f"the process ended before the case did{killed}"}


def _try(one: Case, file: Path, seed: int) -> dict[str, Any]:
    try:
        data = msgspec.json.encode(one.play(load(file), random.Random(seed)))
        assert len(data) <= MAX_RESULT, "the result is too large"
        return {"data": msgspec.json.decode(data)}
    except BaseException as error:
        where = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(file)]
        at = f", at line {where[-1].lineno}: {where[-1].line}" if where else ""
        if isinstance(error, SyntaxError):
            at = f", at line {error.lineno}"
        what = type(error).__name__
        if isinstance(error, MemoryError):
            what = f"out of memory (the limit is {MEMORY // 2**30} GiB)"
        elif isinstance(error, NotImplementedError):
            what, at = "not written yet", f" (line {where[-1].lineno})" if where else ""
        return {"error": f"{what}{f': {error}' if str(error) else ''}{at}"[:2000]}


# ---------------------------------------------------------------- the grader


def run_cases(
    lesson: Lesson, files: Sequence[Path], seed: int, cases: Sequence[Case], seconds: float = 0.0
) -> list[dict[str, dict[str, Any]]]:
    """Plays all cases with each file, in one sandbox. For each file: by case, `data` or `error`.

    `seconds`: what each case gets instead of its own limit.
    """
    answers: list[dict[str, dict[str, Any]]] = [{} for _ in files]
    with tempfile.TemporaryDirectory(prefix="nanopd-grade-", ignore_cleanup_errors=True) as scratch:
        reading, writing = os.pipe()
        program = "import sys; from nanopd_lessons.grading import main; main(*sys.argv[1:])"
        options = lesson.path, scratch, seed, seconds, writing, *(file.resolve() for file in files)
        command = [sys.executable, "-P", "-c", program, *map(str, options)]
        environment = {k: v for k, v in os.environ.items() if k.startswith(("PATH", "LANG", "LC_", "NANOPD", "XDG"))}
        environment |= {
            "PYTHONPATH": _import_path(),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONHASHSEED": "0",
        }
        environment |= {"TRITON_INTERPRET": "1", "NANOPD_CACHE": str(_cache())} | sandbox.own_users()
        lines: list[bytes] = []
        reader = threading.Thread(target=lambda: lines.extend(_read_lines(reading)), daemon=True)
        reader.start()
        limit = LOADING + len(files) * sum(seconds or one.seconds for one in cases)
        in_time = sandbox.run(command, limit, Path(scratch), environment, writing)
        reader.join(5)
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError, KeyError, IndexError, TypeError, AttributeError):
                answer = msgspec.json.decode(line)
                answers[answer["file"]].setdefault(answer["case"], answer)
        said = (Path(scratch) / "output").read_text(errors="replace").strip().rpartition("\n")[2][:300]
        if b'{"ready": true}' not in (line.strip() for line in lines[:1]):
            raise RuntimeError(f"the grader could not start: {said}")
    why = "the time for all cases was up" if not in_time else "the run was ended"
    return [{c.name: found.get(c.name, {"error": why}) for c in cases} for found in answers]


def _read_lines(fd: int) -> list[bytes]:
    with os.fdopen(fd, "rb") as pipe:
        return pipe.read(64 * 2**20).splitlines()


def _import_path() -> str:
    """The folders from which this process has its modules, for a process that does not know our virtual environment's."""
    own = tempfile.gettempdir()
    return os.pathsep.join(p for p in sys.path if p and p != own)


def _cache() -> Path:
    from nanopd.models.default import models_dir

    return models_dir().parent


@dataclass(frozen=True)
class Mark:
    """What came of one case. `problem`: None if it is right."""

    case: Case
    problem: str | None

    @property
    def points(self) -> int:
        return 0 if self.problem else self.case.points


def grade(lesson: Lesson, file: Path, seed: int | None = None, seconds: float = 0.0) -> list[Mark]:
    """Grades a file. `seconds`: see `run_cases`. Raises UserError if there is nothing to grade."""
    if not file.is_file():
        raise UserError(f"There is no file {file}." if not file.exists() else f"{file} is not a regular file.")
    if file.stat().st_size > MAX_SOURCE:
        raise UserError(f"{file} is larger than {MAX_SOURCE // 2**20} MiB; that is no exercise.")
    seed = secrets.randbits(32) if seed is None else seed
    cases = cases_of(lesson.path)
    if problem := _check_source(lesson, file):
        return [Mark(one, problem) for one in cases]
    with ThreadPoolExecutor(2 if sandbox.parallel() else 1) as pool:
        right = pool.submit(run_cases, lesson, [lesson.path / "solution.py"], seed, cases, PATIENCE)
        theirs = pool.submit(run_cases, lesson, [file], seed, cases, seconds)
        try:
            (expected,), (got,) = right.result(), theirs.result()
        except BaseException:  # Ctrl-C, for one
            sandbox.stop()
            raise
    return [Mark(one, judge(got[one.name], expected[one.name])) for one in cases]


def judge(got: dict[str, Any], expected: dict[str, Any]) -> str | None:
    """What is wrong with an answer; None: nothing."""
    if "data" not in expected:
        raise UserError(
            f"The reference solution itself failed ({expected.get('error')}). Is the machine busy? Try again."
        )
    try:
        found = difference(got["data"], expected["data"]) if "data" in got else str(got.get("error", "no answer"))
    except (OverflowError, RecursionError):
        found = "the result cannot be compared with what it should be"
    return found and _harmless(found)


def _harmless(text: str) -> str:
    """Control characters, and those that turn text around, as escapes: it goes to somebody's terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _check_source(lesson: Lesson, file: Path) -> str | None:
    """Can it be parsed, is it this exercise, and does it write that itself instead of importing it from the engine? (The
    last catches accidents, not intent: whoever wants to can import without saying so.)"""
    try:
        theirs, ours = (ast.parse(f.read_bytes()) for f in (file, lesson.path / "exercise.py"))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"this is not Python: {error}"
    used, given = _imports(theirs), _imports(ours)
    kinds = ast.ClassDef | ast.FunctionDef
    names = [{node.name for node in tree.body if isinstance(node, kinds)} for tree in (theirs, ours)]
    if missing := sorted(names[1] - names[0]):
        return f"it has no {', '.join(missing)}: is it the exercise of another lesson?"
    if extra := sorted(used - given):
        return f"it imports {', '.join(extra)}: the engine's own answer is not yours. Use what exercise.py imports"
    return None


def _imports(tree: ast.AST) -> set[str]:
    """What a file imports of nanopd and of the lessons, as dotted names."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] in ("nanopd", "nanopd_lessons")}


def report(lesson: Lesson, file: Path, marks: Sequence[Mark]) -> None:
    """For people."""
    console.print(f"{lesson.number:02} {lesson.title}: {file}\n", markup=False, style="bold")
    same = marks[0].problem if marks and len({mark.problem for mark in marks}) == 1 else None
    if same and not same.startswith("not written yet"):  # about the whole file: once will do
        console.print(Padding(Text(same, "red"), (0, 0, 1, 1)))
    for mark in marks:
        sign = "[green]✓[/]" if not mark.problem else "[red]✗[/]"
        console.print(f" {sign} {mark.points}/{mark.case.points}  {escape(mark.case.title)}", highlight=False)
        if mark.problem and mark.problem != same:
            console.print(Padding(Text(mark.problem, "red"), (0, 0, 0, 8)))
            if not mark.problem.startswith("not written yet"):
                console.print(Padding(Text(f"Hint: {mark.case.hint}"), (0, 0, 0, 8)))
    got, most = sum(m.points for m in marks), sum(m.case.points for m in marks)
    console.print(f"\n {got} of {most} points", style="bold green" if got == most else "bold")
    if missing := sandbox.isolation():
        console.print(
            f" (This system gives the graded code no {missing}; use a container for strangers' code.)", markup=False
        )


def as_gradescope(marks: Sequence[Mark], seconds: float) -> str:
    """The results file that Gradescope's autograder reads."""
    tests = [
        {
            "name": mark.case.title,
            "score": mark.points,
            "max_score": mark.case.points,
            "status": "failed" if mark.problem else "passed",
            "output": f"{mark.problem}\n{f'Hint: {mark.case.hint}' if mark.case.hint else ''}" if mark.problem else "",
        }
        for mark in marks
    ]
    whole = {"score": sum(m.points for m in marks), "execution_time": round(seconds), "tests": tests}
    return json.dumps(whole, indent=2, ensure_ascii=False)


# ---------------------------------------------------------------- for cases


@functools.cache
def model() -> Path:
    """The model that cases run the engine with: the default model if it is in the cache, and a tiny random one if not,
    or if $NANOPD_LESSON_MODEL is "tiny"."""
    from nanopd.models.default import default_model_path

    if os.environ.get("NANOPD_LESSON_MODEL") != "tiny" and (default_model_path() / "model.safetensors").is_file():
        return default_model_path()
    from .drive import tiny_model

    return tiny_model(Path(tempfile.mkdtemp()) / "tiny")


def generate(prompts: Sequence[Sequence[int]], max_tokens: int = 8, **options: Any) -> dict[str, Any]:
    """Greedy tokens of the real engine, by number of the prompt, and what it took. Put a student's class in its place
    with `unittest.mock.patch` around this call. `options`: fields of EngineConfig."""
    from nanopd.config import EngineConfig, SamplingParams
    from nanopd.engine.core import EngineCore
    from nanopd.request import Request

    defaults: dict[str, Any] = {"dtype": "float32", "num_blocks": 64, "max_model_len": 512, "check_invariants": True}
    core = EngineCore(EngineConfig(model=str(model()), **(defaults | options)))
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=0)
    tokens: dict[str, list[int]] = {}
    for i, prompt in enumerate(prompts):
        core.add_request(Request(str(i), list(prompt), params))
    while core.has_unfinished_requests():
        for news in core.step():
            tokens.setdefault(news.request_id, []).extend(news.new_token_ids)
    stats = core.scheduler.stats()
    return {"tokens": tokens, "preemptions": stats.num_preemptions, "cached tokens": stats.prefix_cache_hits}
