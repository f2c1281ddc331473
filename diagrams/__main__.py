"""Builds all pictures and their gallery: `python -m diagrams`; with `--check` only says which are stale."""

import importlib
import sys
from pathlib import Path

from diagrams.drawing import Picture

HERE = Path(__file__).parent
TOOLS = {"__init__", "__main__", "drawing", "runs"}


def names() -> list[str]:
    """Of all pictures: those of their sources."""
    return sorted(path.stem for path in HERE.glob("*.py") if path.stem not in TOOLS)


def build(name: str) -> Picture:
    """Draws one picture. Raises DrawingError if something overlaps."""
    picture = importlib.import_module(f"diagrams.{name}").draw()
    assert isinstance(picture, Picture)
    return picture


def build_all() -> dict[str, str]:
    """File name -> contents, for every picture and the gallery."""
    pictures = {name: build(name) for name in names()}
    files = {f"{name}.svg": picture.svg() for name, picture in pictures.items()}
    lines = [
        "# Pictures",
        "",
        "Each is drawn by the Python file of its name, as far as it can be from the engine's own tables, strides and "
        "runs;",
        "`make diagrams` builds them, and a test fails when one is stale. They follow the reader's light or dark "
        "mode. `drawing.py`",
        "is the board: it refuses what overlaps. The colours of requests are those of the trace viewer.",
        "",
        "| picture | what it shows |",
        "| --- | --- |",
        *(f"| [{name}](#{name}) | {picture.desc} |" for name, picture in pictures.items()),
    ]
    for name, picture in pictures.items():
        lines += ["", f"## {name}", f"![{picture.title}]({name}.svg)"]
    files["README.md"] = "\n".join(lines) + "\n"
    return files


def stale(files: dict[str, str]) -> list[str]:
    """Files that are not as they should be, and pictures without a source."""
    wrong = [f for f, text in files.items() if not (HERE / f).exists() or (HERE / f).read_text("utf-8") != text]
    return sorted(wrong + [path.name for path in HERE.glob("*.svg") if path.name not in files])


def main() -> int:
    """Exit code 1: something is stale (with --check)."""
    if only := [arg for arg in sys.argv[1:] if not arg.startswith("-")]:
        for name in only:
            (HERE / f"{name}.svg").write_text(build(name).svg(), "utf-8")
        return 0
    files = build_all()
    wrong = stale(files)
    if "--check" in sys.argv:
        print("\n".join(f"stale: {name}" for name in wrong) or "all pictures are up to date")
        return bool(wrong)
    for name in wrong:
        if name in files:
            (HERE / name).write_text(files[name], "utf-8")
        else:
            (HERE / name).unlink()
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
