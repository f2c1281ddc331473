"""The committed pictures are what their sources draw today, can be read by everyone, and nothing in them overlaps."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

from diagrams import __main__ as diagrams
from diagrams.drawing import KINDS, MAX_WIDTH, PALETTE, DrawingError, Picture, Point, Route, Sequences, states

ROOT = Path(__file__).parent.parent
SVG = "{http://www.w3.org/2000/svg}"
built = cache(diagrams.build_all)


def test_no_picture_is_stale():
    assert not diagrams.stale(built()), "run `make diagrams`"


def test_every_source_has_a_picture_and_every_picture_a_source():
    assert {path.stem for path in (ROOT / "diagrams").glob("*.svg")} == set(diagrams.names())


@pytest.mark.parametrize("name", diagrams.names())
def test_a_picture_is_readable(name: str):
    text = (ROOT / f"diagrams/{name}.svg").read_text("utf-8")
    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg" and root.get("role") == "img" and root.get("viewBox")
    for tag in ("title", "desc"):
        assert len(root.findtext(f"{SVG}{tag}") or "") > 5
    assert "prefers-color-scheme: dark" in text
    assert float(root.get("width") or "inf") <= MAX_WIDTH
    outside = re.findall(r"(?:href|src|url\(|@import|https?:)[^>\s]*", text.replace("http://www.w3.org/2000/svg", ""))
    assert not outside, "a picture stands alone"
    assert not re.search(r"<(script|image|foreignObject|use)", text)


def test_the_pictures_that_readme_and_lessons_show_are_there():
    used: dict[str, Path] = {}
    for page in [ROOT / "README.md", *(ROOT / "lessons").rglob("*.md")]:
        used |= dict.fromkeys(re.findall(r"diagrams/(\w+)\.svg", page.read_text("utf-8")), page)
    missing = {name: str(page) for name, page in used.items() if name not in diagrams.names()}
    assert not missing
    assert used, "not even the README shows one"


def test_light_and_dark_can_be_read():
    """WCAG's contrast: 4.5 for text, on every ground that it can stand on."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    grounds = [(fill if fill != "none" else "bg", ink) for fill, _, ink, _ in KINDS.values()]
    for mode in (0, 1):
        for ground, ink in [*grounds, ("bg", "ink"), ("bg", "soft")]:
            low, high = sorted(luminance(PALETTE[name][mode]) for name in (ground, ink))
            assert (high + 0.05) / (low + 0.05) >= 4.5, f"{ink} on {ground}"


# ---------------------------------------------------------------- the board refuses what must not be


def overlapping() -> Iterator[tuple[str, Picture]]:
    p = Picture("two boxes", "…")
    p.box(0, 0, "one")
    p.box(20, 10, "two")
    yield "overlap", p
    p = Picture("two texts", "…")
    p.text(0, 0, "one text")
    p.text(30, 5, "another")
    yield "overlap", p
    p = Picture("too long", "…")
    p.box(0, 0, "a text that is longer than its box", w=60)
    yield "sticks out", p
    p = Picture("not its own", "…")
    p.box(0, 0, "", 200, 40)
    p.text(20, 20, "lost")
    yield "lies on the box", p
    p = Picture("through a text", "…")
    p.text(50, 0, "word")
    p.arrow(Point(0, 0), Point(200, 0))
    yield "through the text", p
    p = Picture("through a box", "…")
    p.box(50, -10, "", 40, 20)
    p.arrow(Point(0, 0), Point(200, 0))
    yield "through the box", p
    p = Picture("crossing", "…")
    p.arrow(Point(0, 0), Point(100, 100))
    p.arrow(Point(0, 100), Point(100, 0))
    yield "cross", p
    p = Picture("on each other", "…")
    p.arrow(Point(0, 0), Point(100, 0))
    p.arrow(Point(50, 0), Point(150, 0))
    yield "cross", p
    p = Picture("wide", "…")
    p.box(0, 0, "", 2000, 40)
    yield "pixels wide", p
    p = Picture("a message through a note", "…")
    s = Sequences(p, [("a", 0, "plain"), ("b", 300, "plain")])
    s.note(0, "a note", b=1)
    s.y -= 50
    s.say(0, 1, "hi")
    yield "through the box", p


@pytest.mark.parametrize(
    ("reason", "picture"), list(overlapping()), ids=lambda x: x.title if isinstance(x, Picture) else ""
)
def test_the_board_refuses(reason: str, picture: Picture):
    with pytest.raises(DrawingError, match=reason):
        picture.svg()


def test_what_only_touches_is_fine():
    p = Picture("fine", "…")
    p.group(0, 0, 300, 100, "a group")
    a, b = p.cells(20, 40, ["a", "b"])
    p.arrow(Point(160, 54), b.r())
    assert a.rect.x1 == b.rect.x0
    assert p.svg() == p.svg(), "the same picture twice"


def test_a_new_transition_must_get_its_place():
    places = {"x": (0.0, 0.0, "plain"), "y": (200.0, 0.0, "plain")}
    routes = {("x", "y"): Route("r", "l")}
    states(Picture("as it is", "…"), {"x": ["y"], "y": []}, places, routes, name=str).clear()
    for table, reason in (
        ({"x": ["y"], "y": ["x"]}, "no route"),
        ({"x": ["y", "z"], "y": []}, "no place"),
        ({"x": [], "y": []}, "a route for transitions that are not there"),
    ):
        with pytest.raises(DrawingError, match=reason):
            states(Picture("changed", "…"), table, places, routes, name=str)
