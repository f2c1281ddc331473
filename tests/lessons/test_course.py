"""The lessons: their scripts hold, their texts say what is so, their exercises give the points they should."""

import ast
import contextlib
import functools
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
import typer.main

from nanopd.cli import add_checkout_commands, app
from nanopd_lessons import course
from nanopd_lessons.course import Lesson
from tests import forked

ROOT = Path(__file__).parents[2]
TEXTS = [*sorted((ROOT / "lessons").glob("**/*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
LESSONS = course.lessons()
each_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.path.name)
each_text = pytest.mark.parametrize("text", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))


# ---------------------------------------------------------------- scripts


def run_walk(path: Path) -> "subprocess.CompletedProcess[bytes]":
    return forked.run([str(path)])


@each_lesson
def test_the_claims_of_a_lesson_hold(lesson: Lesson):
    done = run_walk(lesson.path / "walk.py")
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    cells = [*course.cells((lesson.path / "walk.py").read_text())]
    assert sum(map(course.num_claims, cells)) >= 8, "a lesson that claims so little teaches little"
    assert any(cell.kind == "markdown" for cell in cells)


def test_a_claim_that_does_not_hold_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    script = (course.find("3").path / "walk.py").read_text()
    right = "assert free_queue(scheduler.kv.pool)[-4:] == [9, 8, 7, 3]"
    assert script.count(right) == 1
    broken = Lesson(3, tmp_path / "03_broken")
    broken.path.mkdir()
    (broken.path / "README.md").write_text("# 03 Broken\n\n*5 minutes*\n")
    (broken.path / "walk.py").write_text(script.replace(right, right.replace("[9, 8, 7, 3]", "[3, 7, 8, 9]")))
    assert course.run(broken, step=False) == 1
    assert "This does not hold" in (said := capsys.readouterr().out) and "[3, 7, 8, 9]" in said
    assert run_walk(broken.path / "walk.py").returncode == 1


def test_stepping_waits_before_each_piece_of_code():
    command = [sys.executable, "-m", "nanopd", "lesson", "run", "03", "--step"]
    done = subprocess.run(command, input="\n\nq\n", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.count("Enter: run it") == 3
    assert "A pool of numbers" in done.stdout and "The drawing, re-enacted" not in done.stdout


# ---------------------------------------------------------------- texts


@each_lesson
def test_a_lesson_is_complete(lesson: Lesson):
    files = {"README.md", "walk.py", "exercise.py", "solution.py", "test_exercise.py"}
    assert files <= {path.name for path in lesson.path.iterdir()}
    assert re.fullmatch(r"# \d\d .+", lesson.text.splitlines()[0]) and lesson.minutes > 0
    for heading in (
        "The question",
        "The picture",
        "The idea",
        "The code",
        "Try it",
        "What goes wrong in production",
        "Exercise",
    ):
        assert f"\n## {heading}" in lesson.text, f"no section {heading!r}"
    assert str(lesson.number).zfill(2) == lesson.path.name[:2]


def test_the_path_lists_every_lesson_as_it_is():
    path = (ROOT / "lessons/README.md").read_text()
    for lesson in LESSONS:
        assert f"| [{lesson.number:02} {lesson.title}]({lesson.path.name}/README.md) | {lesson.minutes} |" in path
    assert [lesson.number for lesson in LESSONS] == list(range(17))


def test_every_module_and_every_rule_has_its_lesson():
    """A module is linked from a lesson's text, a rule is named there."""
    texts = "\n".join(lesson.text for lesson in LESSONS)
    for module in sorted((ROOT / "nanopd").glob("*/*.py")):
        name = str(module.relative_to(ROOT))
        assert module.name == "__init__.py" or f"../{name})" in texts, f"no lesson links to {name}"
    rules = re.findall(r"^- \*\*([SKTP]\d+)\*\*", (ROOT / "lessons/rules.md").read_text(), re.MULTILINE)
    named = set(re.findall(r"\b[SKTP]\d+\b", texts))
    assert len(rules) > 30 and not (missing := set(rules) - named), f"no lesson is about {sorted(missing)}"


def prose(text: str) -> str:
    """Without fenced blocks, link targets and names in backticks."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return re.sub(r"`[^`]*`", "", re.sub(r"\]\([^)]*\)", "]", text))


@each_lesson
def test_numbers_of_a_text_are_in_its_script(lesson: Lesson):
    """Three digits and more, or with a decimal point: a figure that the script must have computed or asserted. Not those
    of reports (#123, CVE-2025-1, years)."""
    reports = r"(#|issue |issues |PR |pull request |CVE-\d+-|arXiv:|sm_|gfx|vLLM |SGLang |Python )\d[\d.,]*"
    text = re.sub(reports, "", prose(lesson.text))
    script = re.sub(r"[_,](?=\d{3})", "", (lesson.path / "walk.py").read_text())
    for number in re.findall(r"(?<![\w.-])\d[\d,]*(?:\.\d+)?(?![\w-])", text):
        plain = number.replace(",", "")
        if (len(plain.partition(".")[0]) >= 3 or "." in plain) and not re.fullmatch(r"20[12]\d", plain):
            assert re.search(rf"(?<![\d.]){re.escape(plain)}(?!\d)", script), f"{number} is not in walk.py"


@each_text
def test_links_lead_somewhere(text: Path):
    for label, target in re.findall(r"\[([^\]]+)\]\(([^)\s]+)\)", text.read_text()):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        file = (text.parent / name).resolve() if name else text
        assert file.exists(), f"{label}: {target} is not there"
        if anchor and file.suffix == ".md":
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings]
            assert anchor in slugs, f"{target}: no such heading"
        symbol = re.fullmatch(r"`?([A-Za-z_][\w.]*?)(\(\))?`?", label)
        if file.suffix == ".py" and symbol and not symbol[1].endswith(".py"):
            assert_defined(file, symbol[1])


@functools.cache
def parsed(file: Path) -> list[ast.stmt]:
    """A module's statements; once a file. Python 3.11 can fail when it is interrupted in here (its issue 106905)."""
    with contextlib.suppress(SystemError):
        return ast.parse(file.read_text()).body
    return ast.parse(file.read_text()).body


def assert_defined(file: Path, dotted: str) -> None:
    """`Class.method`, a function, a class, or a name assigned in a module or class."""
    scope = parsed(file)
    for part in dotted.split("."):
        found = None
        for node in scope:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if part in (getattr(node, "name", None), *(getattr(t, "id", None) for t in targets)):
                found = node
        assert found is not None, f"{file.name} has no {dotted}"
        scope = getattr(found, "body", [])


@each_text
def test_commands_exist(text: Path):
    """Each `nanopd …` of a code block names a command and options that there are."""
    add_checkout_commands()
    root = typer.main.get_command(app)
    for block in re.findall(r"```(?:sh|console|bash)?\n(.*?)```", text.read_text(), re.DOTALL):
        for line in re.findall(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*(nanopd .*)$", block, re.MULTILINE):
            words = re.sub(r"\s#.*$", "", line).split()[1:]
            command, options = root, set[str]()
            while True:
                options |= {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | {"--help"}
                known = isinstance(command, click.Group) or hasattr(command, "commands")
                name = next((w for w in words if not w.startswith("-")), None) if known else None
                if name is None:
                    break
                assert name in command.commands, f"{line!r}: no command {name}"
                command, words = command.commands[name], words[words.index(name) + 1 :]
            for word in words:
                if word.startswith("--"):
                    assert word.partition("=")[0] in options, f"{line!r}: no option {word}"


def bold_terms(text: str) -> list[str]:
    return re.findall(r"\*\*([^*\n]+)\*\*", prose(text).replace("\n", " "))


def test_terms_are_introduced_once_and_explained():
    """Bold in a lesson: a new word. It is so in one lesson only, and the glossary has it and says where it came up."""
    glossary = (ROOT / "lessons/glossary.md").read_text()
    entries = dict(re.findall(r"^- \*\*(.+?)\*\*:? (.*)$", glossary, re.MULTILINE))
    assert list(entries) == sorted(entries, key=str.lower), "the glossary is in order"
    introduced: dict[str, str] = {}
    for lesson in LESSONS:
        for term in bold_terms(lesson.text):
            if re.fullmatch(r"[A-Z]\d+", term):
                continue  # a rule
            key = term.lower().strip(".:,")
            assert key not in introduced, f"{term!r} is introduced in {introduced[key]} and in {lesson.path.name}"
            introduced[key] = lesson.path.name
            assert key in {name.lower() for name in entries}, f"{term!r} of {lesson.path.name} is not in the glossary"
            about = next(about for name, about in entries.items() if name.lower() == key)
            assert f"{lesson.number:02}" in about, (
                f"the glossary does not say that {term!r} comes up in {lesson.path.name}"
            )
