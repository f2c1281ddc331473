"""Lessons as files: where they are, what their texts say about them, and their scripts, cell by cell.

A lesson is a folder `NN_name` with README.md (the text), walk.py (a script in percent cells, which drives the real
modules and asserts what the text claims), exercise.py, solution.py and test_exercise.py.
"""

import ast
import contextlib
import linecache
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.markdown import Markdown
from rich.rule import Rule
from rich.syntax import Syntax

from nanopd.config import UserError

from .show import console

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Lesson:
    """One folder. `about` is the line of facts under the title: time, what comes before, modules, rules."""

    number: int
    path: Path

    @property
    def text(self) -> str:
        return (self.path / "README.md").read_text()

    @property
    def title(self) -> str:
        return self.text.splitlines()[0].removeprefix("#").strip().partition(" ")[2]

    @property
    def about(self) -> str:
        return self.text.splitlines()[2].strip("* ")

    @property
    def minutes(self) -> int:
        found = re.match(r"(\d+) minutes", self.about)
        assert found, f"{self.path.name}/README.md does not begin with '*NN minutes · …*'"
        return int(found[1])


def lessons() -> list[Lesson]:
    """All, in order."""
    found = (re.fullmatch(r"(\d\d)_\w+", path.name) for path in sorted(HERE.iterdir()))
    return [
        Lesson(int(match[1]), HERE / match[0]) for match in found if match and (HERE / match[0] / "README.md").exists()
    ]


def find(name: str) -> Lesson:
    """By number (`3`, `03`) or by folder (`03_block_pool`). Raises UserError."""
    for lesson in lessons():
        if name in (lesson.path.name, str(lesson.number), f"{lesson.number:02}"):
            return lesson
    raise UserError(f"There is no lesson {name!r}; `nanopd lesson list` names them all.")


@dataclass(frozen=True)
class Cell:
    """A piece of a script. `line`: the number of its first line in the file, from 1."""

    kind: str  # "markdown" or "code"
    source: str
    line: int


def cells(script: str) -> Iterator[Cell]:
    """The cells of a script in the percent format: `# %% [markdown]` begins prose, in comments; `# %%` begins code."""
    marks = [*re.finditer(r"^# %%(.*)$", script, re.MULTILINE)]
    for mark, following in zip(marks, [*marks[1:], None]):
        body = script[mark.end() + 1 : following.start() if following else len(script)]
        line = script.count("\n", 0, mark.end()) + 2
        if "[markdown]" in mark[1]:
            yield Cell("markdown", re.sub(r"^# ?", "", body, flags=re.MULTILINE).strip(), line)
        elif body.strip():
            yield Cell("code", body.rstrip(), line)


def num_claims(cell: Cell) -> int:
    """How many assertions a cell has."""
    return sum(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(cell.source))) if cell.kind == "code" else 0


def run(lesson: Lesson, step: bool) -> int:
    """Runs a lesson's script: prose, code, and what it prints. With `step` it waits before each piece of code.

    Returns 0, or 1 when a claim does not hold.
    """
    path = lesson.path / "walk.py"
    sys.path.insert(0, str(lesson.path))
    script = path.read_text()
    module = ModuleType("__main__")  # where the script's names live, as if it had been started itself
    module.__file__ = str(path)
    linecache.cache[str(path)] = (len(script), None, script.splitlines(True), str(path))
    held = 0
    console.print(Rule(f"{lesson.number:02} {lesson.title}"))
    for cell in cells(script):
        console.print()
        if cell.kind == "markdown":
            console.print(Markdown(re.sub(r"\A# .*\n", "", cell.source)))  # the title stands above
            continue
        options: dict[str, Any] = {"line_numbers": True, "start_line": cell.line, "background_color": "default"}
        console.print(Syntax(cell.source, "python", word_wrap=True, **options))
        if step and not _go_on():
            return 0
        try:
            exec(compile("\n" * (cell.line - 1) + cell.source, str(path), "exec"), module.__dict__)
        except SystemExit:  # it has said why it cannot go on here
            break
        except AssertionError as error:
            at = traceback.extract_tb(error.__traceback__)
            where = next((f for f in reversed(at) if f.filename == str(path)), at[-1])
            console.print(
                f"\n[bold red]This does not hold[/] ({path.name}, line {where.lineno}): {where.line}", highlight=False
            )
            if str(error):
                console.print(str(error), markup=False)
            return 1
        held += (claims := num_claims(cell))
        if claims:
            console.print(f"  ✓ {claims} claim{'s hold' if claims > 1 else ' holds'}", style="green")
    console.print(Rule(f"all {held} claims hold"))
    return 0


def _go_on() -> bool:
    """Waits for Enter. False: q, or the end of the input."""
    with contextlib.suppress(EOFError):
        sys.stdout.flush()
        return input("\n  Enter: run it   q, Enter: stop  ").strip().lower() != "q"
    return False
