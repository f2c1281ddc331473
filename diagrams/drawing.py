"""A small drawing board that writes SVG: boxes, arrows, tables, sequence and state diagrams, in one palette and one size.

It refuses what must not be in a picture. `Picture.svg` raises DrawingError if a text overlaps another, sticks out of its box
or lies on one it does not belong to, if boxes overlap, if a line runs through a text or a box or crosses another line, or if
the picture is wider than a page. Widths of texts are estimated from Helvetica's (Arial and Liberation Sans have the same),
with some room to spare, so the result depends on no font of the machine that builds it.

A text may hold `code` in backquotes and line breaks. Coordinates are pixels; a text's y is the middle of its first line.
Colours have meanings, see KINDS; light and dark are the two halves of PALETTE. It knows nothing of the engine.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from typing import Any, NamedTuple

SIZE, LINE, PAD, MARGIN = 14, 19, 10, 24
MAX_WIDTH = 1000  # about what a README shows at its full size

# name: light, dark. Requests have the hues of the trace viewer, in its order.
PALETTE = {
    "bg": ("#ffffff", "#15171b"),
    "panel": ("#f7f6f3", "#1e2127"),
    "ink": ("#1f2328", "#e4e4e1"),
    "soft": ("#5d646e", "#a3a9b4"),
    "line": ("#c9c7c1", "#454a54"),
    "a": ("#b7dbff", "#273e5c"),
    "a-line": ("#5e9ae7", "#5188cd"),
    "b": ("#ffc6b8", "#583129"),
    "b-line": ("#dc7863", "#c46956"),
    "c": ("#a6e8d0", "#144738"),
    "c-line": ("#1ab28c", "#109d7b"),
    "d": ("#e5cbff", "#463456"),
    "d-line": ("#ae81d6", "#9a71be"),
    "accent": ("#e8ecfb", "#262d47"),
    "accent-line": ("#3451c7", "#9db1ff"),
    "warn": ("#fdf1da", "#3d311a"),
    "warn-line": ("#8a5a00", "#f0c16b"),
    "bad": ("#fbe9e7", "#43211f"),
    "bad-line": ("#b3261e", "#ff9d94"),
    "good": ("#e3f4e9", "#1d3527"),
    "good-line": ("#2e7d4f", "#7fd1a0"),
}

# What a box means: fill, border, colour of its text, dashed?
KINDS = {
    "plain": ("panel", "line", "ink", False),  # a part, a step
    "group": ("none", "line", "soft", False),  # what belongs together: may hold other boxes
    "panel": ("panel", "line", "soft", False),  # the same, filled
    "a": ("a", "a-line", "ink", False),  # requests, each with its own colour, and what is theirs
    "b": ("b", "b-line", "ink", False),
    "c": ("c", "c-line", "ink", False),
    "d": ("d", "d-line", "ink", False),
    "a old": ("bg", "a-line", "ink", False),  # theirs as well, from an earlier step, or less of it
    "b old": ("bg", "b-line", "ink", False),
    "c old": ("bg", "c-line", "ink", False),
    "d old": ("bg", "d-line", "ink", False),
    "free": ("bg", "line", "soft", False),  # a block that nobody holds and nobody can find
    "cached": ("bg", "soft", "soft", True),  # a block that nobody holds, and that can still be found
    "accent": ("accent", "accent-line", "ink", False),  # what the picture is about; a hit
    "good": ("good", "good-line", "ink", False),
    "warn": ("warn", "warn-line", "ink", False),  # remote, on its way, evicted
    "bad": ("bad", "bad-line", "ink", False),  # failure
}
HOLDERS = {"group", "panel"}

# Helvetica, in thousandths of the size: characters 32 to 126.
_HELVETICA = [
    278, 278, 355, 556, 556, 889, 667, 191, 333, 333, 389, 584, 278, 333, 278, 278, 556, 556, 556, 556, 556, 556, 556,
    556, 556, 556, 278, 278, 584, 584, 584, 556, 1015, 667, 667, 722, 722, 667, 611, 778, 722, 278, 500, 667, 556,
    833, 722, 778, 667, 778, 722, 667, 611, 722, 667, 944, 667, 667, 611, 278, 278, 278, 469, 556, 333, 556, 556, 500,
    556, 556, 278, 556, 556, 222, 222, 500, 222, 833, 556, 556, 556, 556, 333, 500, 278, 556, 500, 722, 500, 500, 500,
    334, 260, 334, 584,
]  # fmt: skip
_WIDTHS = dict(zip(map(chr, range(32, 127)), _HELVETICA))


class DrawingError(Exception):
    """This picture must not be published as it is."""


class Point(NamedTuple):
    """A place."""

    x: float
    y: float


class Rect(NamedTuple):
    """Left, top, right, bottom."""

    x0: float
    y0: float
    x1: float
    y1: float

    def overlaps(self, other: "Rect", by: float = 0.75) -> bool:
        width, height = min(self.x1, other.x1) - max(self.x0, other.x0), min(self.y1, other.y1) - max(self.y0, other.y0)
        return width > by and height > by

    def holds(self, other: "Rect", margin: float = 0.0) -> bool:
        return (
            other.x0 >= self.x0 + margin
            and other.y0 >= self.y0 + margin
            and other.x1 <= self.x1 - margin
            and other.y1 <= self.y1 - margin
        )

    def crossed_by(self, a: Point, b: Point, inset: float = 1.0) -> bool:
        """Does the line from a to b come into this rectangle, made smaller by `inset`? (Liang-Barsky clipping.)"""
        low, high = 0.0, 1.0
        for start, delta, near, far in (
            (a.x, b.x - a.x, self.x0 + inset, self.x1 - inset),
            (a.y, b.y - a.y, self.y0 + inset, self.y1 - inset),
        ):
            if near >= far:
                return False
            if delta == 0:
                if not near < start < far:
                    return False
                continue
            first, last = sorted(((near - start) / delta, (far - start) / delta))
            low, high = max(low, first), min(high, last)
        return low < high


def spans(line: str) -> list[tuple[str, bool]]:
    """Pieces of one line, and whether each is code."""
    return [(part, i % 2 == 1) for i, part in enumerate(line.split("`")) if part]


def text_width(line: str, bold: bool = False) -> float:
    """Pixels, rather too many than too few."""
    total = 0.0
    for part, code in spans(line):
        em = len(part) * 0.605 if code else sum(_WIDTHS.get(c, 700) for c in part) / 1000 * (1.1 if bold else 1.04)
        total += em * SIZE
    return total


def fit(text: str, bold: bool = False) -> tuple[float, float]:
    """Width and height of a text."""
    lines = text.split("\n")
    return max(text_width(line, bold) for line in lines), LINE * len(lines)


def _n(value: float) -> str:
    return f"{round(value, 1):g}"


@dataclass(eq=False)
class Box:
    """A rectangle that is in the picture. Its sides are where arrows start and end: f goes from 0 to 1 along a side."""

    rect: Rect
    kind: str
    what: str

    def l(self, f: float = 0.5) -> Point:  # noqa: E743
        return Point(self.rect.x0, self.rect.y0 + f * (self.rect.y1 - self.rect.y0))

    def r(self, f: float = 0.5) -> Point:
        return Point(self.rect.x1, self.rect.y0 + f * (self.rect.y1 - self.rect.y0))

    def t(self, f: float = 0.5) -> Point:
        return Point(self.rect.x0 + f * (self.rect.x1 - self.rect.x0), self.rect.y0)

    def b(self, f: float = 0.5) -> Point:
        return Point(self.rect.x0 + f * (self.rect.x1 - self.rect.x0), self.rect.y1)


@dataclass
class _Text:
    rect: Rect
    what: str
    owner: Box | None
    halo: bool


@dataclass
class _Line:
    points: list[Point]
    what: str
    crosses: bool  # may cross other lines: messages and lifelines of a sequence diagram
    under: bool = False  # a lifeline: boxes stand on it


@dataclass
class Picture:
    """One picture. `title` stands in it; `desc` is for those who cannot see it."""

    title: str
    desc: str
    source: str = ""  # what of the code it shows, on the right of the title
    _out: list[tuple[int, str]] = field(default_factory=list)
    _texts: list[_Text] = field(default_factory=list)
    _boxes: list[Box] = field(default_factory=list)
    _lines: list[_Line] = field(default_factory=list)

    # ------------------------------------------------------------ texts

    def text(
        self,
        x: float,
        y: float,
        text: str,
        anchor: str = "start",
        kind: str = "ink",
        bold: bool = False,
        owner: Box | None = None,
        halo: bool = False,
    ) -> Rect:
        """One or more lines. `halo`: with a ground of its own, so that it can stand on a lifeline."""
        rects = []
        for i, line in enumerate(text.split("\n")):
            if not line:
                continue
            width, middle = text_width(line, bold), y + i * LINE
            left = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
            rect = Rect(left, middle - LINE / 2 + 1, left + width, middle + LINE / 2 - 1)
            rects.append(rect)
            self._texts.append(_Text(rect, line, owner, halo))
            if halo:
                self._out.append((3, self._rect(Rect(left - 3, rect.y0, rect.x1 + 3, rect.y1), "f-bg", 0)))
            parts = "".join(
                f'<tspan class="m">{escape(part, False)}</tspan>' if code else escape(part, False)
                for part, code in spans(line)
            )
            weight = " k" if bold else ""
            self._out.append(
                (
                    4,
                    f'<text class="f-{kind}{weight}" x="{_n(x)}" y="{_n(middle + 5)}" '
                    f'text-anchor="{anchor}">{parts}</text>',
                )
            )
        return Rect(
            min(r.x0 for r in rects), min(r.y0 for r in rects), max(r.x1 for r in rects), max(r.y1 for r in rects)
        )

    # ------------------------------------------------------------ boxes

    @staticmethod
    def _rect(r: Rect, classes: str, radius: float, dashed: bool = False) -> str:
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        return (
            f'<rect class="{classes}" x="{_n(r.x0)}" y="{_n(r.y0)}" width="{_n(r.x1 - r.x0)}" '
            f'height="{_n(r.y1 - r.y0)}" '
            f'rx="{_n(radius)}"{dash}/>'
        )

    def box(
        self,
        x: float,
        y: float,
        text: str = "",
        w: float | None = None,
        h: float | None = None,
        kind: str = "plain",
        align: str = "middle",
        bold: bool = False,
        radius: float = 6,
        pad: float = PAD,
    ) -> Box:
        """A box whose top left corner is at x, y, as large as its text or as told."""
        width, height = fit(text, bold) if text else (0.0, 0.0)
        w, h = w if w is not None else width + 2 * pad, h if h is not None else height + 2 * pad - 4
        fill, border, ink, dashed = KINDS[kind]
        box = Box(Rect(x, y, x + w, y + h), kind, text.split("\n")[0])
        self._boxes.append(box)
        self._out.append((1, self._rect(box.rect, f"f-{fill} s-{border}", radius, dashed)))
        if text:
            lines = text.split("\n")
            top = y + h / 2 - (len(lines) - 1) * LINE / 2
            self.text(x + w / 2 if align == "middle" else x + pad, top, text, align, ink, bold, box)
        return box

    def group(
        self, x: float, y: float, w: float, h: float, label: str = "", kind: str = "group", bold: bool = True
    ) -> Box:
        """A box that may hold others; its label stands inside, at the top left."""
        fill, border, ink, dashed = KINDS[kind]
        box = Box(Rect(x, y, x + w, y + h), "group", label)
        self._boxes.append(box)
        self._out.append((0, self._rect(box.rect, f"f-{fill} s-{border}", 10, dashed)))
        if label:
            self.text(x + 12, y + 17, label, kind=ink, bold=bold, owner=box)
        return box

    def fill(self, x: float, y: float, w: float, h: float, kind: str, radius: float = 2) -> None:
        """A coloured area, such as a bar: things may lie on it."""
        fill, border, _, dashed = KINDS[kind]
        self._out.append((1, self._rect(Rect(x, y, x + w, y + h), f"f-{fill} s-{border}", radius, dashed)))

    def cells(
        self,
        x: float,
        y: float,
        items: Iterable[str | tuple[str, str]],
        w: float = 40,
        h: float = 28,
        kind: str = "plain",
        gap: float = 0,
    ) -> list[Box]:
        """A row of equal boxes, each a text, or a text and a kind."""
        pairs = [item if isinstance(item, tuple) else (item, kind) for item in items]
        return [
            self.box(x + i * (w + gap), y, text, w, h, of, radius=3 if gap == 0 else 5)
            for i, (text, of) in enumerate(pairs)
        ]

    def table(
        self,
        x: float,
        y: float,
        rows: Sequence[Sequence[str]],
        widths: Sequence[float] | None = None,
        header: bool = True,
        kinds: Mapping[int, str] | None = None,
        h: float = 28,
    ) -> Box:
        """Lines of cells, left-aligned. `kinds`: rows (by number) that have a colour."""
        columns = range(len(rows[0]))
        widths = widths or [
            max(text_width(row[i], header and n == 0) for n, row in enumerate(rows)) + 2 * PAD for i in columns
        ]
        heights = [max(h, max(fit(cell)[1] for cell in row) + 9) for row in rows]
        whole = self.group(x, y, sum(widths), sum(heights), kind="panel")
        for n, row in enumerate(rows):
            top = y + sum(heights[:n])
            if kinds and n in kinds:
                fill, border, *_ = KINDS[kinds[n]]
                self._out.append(
                    (1, self._rect(Rect(x, top, x + sum(widths), top + heights[n]), f"f-{fill} s-{border}", 4))
                )
            elif n:
                self._out.append((1, self._path([Point(x, top), Point(x + sum(widths), top)], "s-line", 1)))
            for i, cell in enumerate(row):
                head = header and n == 0
                left = x + sum(widths[:i])
                if cell and text_width(max(cell.split("\n"), key=text_width), head) > widths[i] - PAD:
                    raise DrawingError(f"{self.title}: {cell!r} does not fit into its column")
                if cell:
                    middle = top + heights[n] / 2 - (len(cell.split("\n")) - 1) * LINE / 2
                    self.text(left + PAD, middle, cell, kind="soft" if head else "ink", bold=head, owner=whole)
        return whole

    def legend(self, x: float, y: float, items: Iterable[tuple[str, str]]) -> None:
        """Small samples of kinds, with what they mean."""
        for kind, text in items:
            fill, border, _, dashed = KINDS[kind]
            self._out.append((1, self._rect(Rect(x, y - 7, x + 18, y + 7), f"f-{fill} s-{border}", 3, dashed)))
            x = self.text(x + 25, y, text, kind="soft").x1 + 20

    # ------------------------------------------------------------ lines

    @staticmethod
    def _path(points: Sequence[Point], classes: str, width: float = 1.5, dashed: bool = False) -> str:
        d = f"M{_n(points[0].x)} {_n(points[0].y)}"
        for before, corner, after in zip(points, points[1:], points[2:]):
            r = min(7.0, _length(before, corner) / 2, _length(corner, after) / 2)
            p, q = _toward(corner, before, r), _toward(corner, after, r)
            d += f"L{_n(p.x)} {_n(p.y)}Q{_n(corner.x)} {_n(corner.y)} {_n(q.x)} {_n(q.y)}"
        d += f"L{_n(points[-1].x)} {_n(points[-1].y)}"
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        return f'<path class="{classes}" d="{d}" fill="none" stroke-width="{_n(width)}"{dash}/>'

    def arrow(
        self,
        start: Point,
        end: Point,
        label: str = "",
        way: str = "",
        bend: float | None = None,
        on: int | None = None,
        side: str = "",
        at: float = 0.5,
        kind: str = "soft",
        dashed: bool = False,
        both: bool = False,
        head: bool = True,
        crosses: bool = False,
        halo: bool = False,
        shift: float = 0,
    ) -> None:
        """From start to end.

        way: "" straight; "-|" across, then down or up; "|-" the other way; "-|-" and "|-|" with a bend in the middle, or
        at x (y) = `bend`. The label stands beside segment number `on` (else the longest), at share `at` of it: above or
        "below" one that goes across, right or "left" of one that goes up or down.
        """
        points = [start]
        if way == "-|":
            points.append(Point(end.x, start.y))
        elif way == "|-":
            points.append(Point(start.x, end.y))
        elif way == "-|-":
            middle = (start.x + end.x) / 2 if bend is None else bend
            points += [Point(middle, start.y), Point(middle, end.y)]
        elif way == "|-|":
            middle = (start.y + end.y) / 2 if bend is None else bend
            points += [Point(start.x, middle), Point(end.x, middle)]
        points.append(end)
        self._lines.append(_Line(points, label or f"{start} to {end}", crosses))
        tip = _toward(end, points[-2], 7) if head else end
        tail = _toward(start, points[1], 7) if both else start
        self._out.append((2, self._path([tail, *points[1:-1], tip], f"s-{kind}", dashed=dashed)))
        for there, come_from in [(end, points[-2])] * head + [(start, points[1])] * both:
            back = _toward(there, come_from, 9)
            dx, dy = (there.y - back.y) / 9 * 4, (back.x - there.x) / 9 * 4
            corners = (
                f"{_n(there.x)},{_n(there.y)} {_n(back.x + dx)},{_n(back.y + dy)} {_n(back.x - dx)},{_n(back.y - dy)}"
            )
            self._out.append((2, f'<polygon class="f-{kind}" points="{corners}"/>'))
        if label:
            pairs = list(pairwise(points))
            p, q = pairs[on] if on is not None else max(pairs, key=lambda pair: _length(*pair))
            x, y, extra = p.x + at * (q.x - p.x), p.y + at * (q.y - p.y), (len(label.split("\n")) - 1) * LINE
            if abs(p.y - q.y) < abs(p.x - q.x):
                self.text(x + shift, y + (14 if side == "below" else -12 - extra), label, "middle", "soft", halo=halo)
            else:
                anchor = "end" if side == "left" else "start"
                self.text(x + (-8 if side == "left" else 8), y - extra / 2 + shift, label, anchor, "soft", halo=halo)

    def line(self, *points: Point, kind: str = "line", dashed: bool = False, crosses: bool = False) -> None:
        """A line without a head."""
        self._lines.append(_Line(list(points), f"line at {points[0]}", crosses, under=crosses))
        self._out.append((0 if crosses else 2, self._path(points, f"s-{kind}", 1.5, dashed)))

    def bracket(self, x0: float, x1: float, y: float, label: str, below: bool = True, kind: str = "soft") -> None:
        """A brace over or under something, with what it is."""
        tick = -5 if below else 5
        self.line(Point(x0, y + tick), Point(x0, y), Point(x1, y), Point(x1, y + tick), kind=kind)
        extra = (len(label.split("\n")) - 1) * LINE
        self.text((x0 + x1) / 2, y + 13 if below else y - 13 - extra, label, "middle", "soft")

    def rule(self, x: float, y: float, name: str) -> Box:
        """The name of a rule of lessons/rules.md; x, y is the middle of its left edge."""
        return self.box(x, y - 11, name, h=22, kind="accent", radius=11, pad=8)

    # ------------------------------------------------------------ the whole

    def problems(self) -> list[str]:
        """What would look wrong."""
        found: list[str] = []
        fail = found.append

        for i, text in enumerate(self._texts):
            for other in self._texts[:i]:
                if text.rect.overlaps(other.rect):
                    fail(f"the texts {text.what!r} and {other.what!r} overlap")
            for box in self._boxes:
                if box is text.owner:
                    if not box.rect.holds(text.rect, 1):
                        fail(f"{text.what!r} sticks out of its box")
                elif text.rect.overlaps(box.rect) and not (box.kind == "group" and box.rect.holds(text.rect, 3)):
                    fail(f"the text {text.what!r} lies on the box {box.what!r} at {box.rect}")
        for i, box in enumerate(self._boxes):
            for second in self._boxes[:i]:
                nested = any(p.kind == "group" and p.rect.holds(q.rect, 3) for p, q in ((box, second), (second, box)))
                if box.rect.overlaps(second.rect) and not nested:
                    fail(f"the boxes {box.what!r} {box.rect} and {second.what!r} {second.rect} overlap")
        for i, line in enumerate(self._lines):
            for a, b in pairwise(line.points):
                for text in self._texts:
                    if text.rect.crossed_by(a, b) and not (line.under and (text.halo or text.owner)):
                        fail(f"the line {line.what!r} runs through the text {text.what!r}")
                for box in self._boxes:
                    if box.kind != "group" and box.rect.crossed_by(a, b, 1.5) and not line.under:
                        fail(f"the line {line.what!r} runs through the box {box.what!r} {box.rect}")
            for before in self._lines[:i]:
                if not (line.crosses or before.crosses) and _cross(line, before):
                    fail(f"the lines {line.what!r} and {before.what!r} cross")
        return found

    def bounds(self) -> Rect:
        """Of all that is drawn."""
        rects = [t.rect for t in self._texts] + [b.rect for b in self._boxes]
        points = [p for line in self._lines for p in line.points]
        return Rect(
            min([r.x0 for r in rects] + [p.x for p in points]),
            min([r.y0 for r in rects] + [p.y for p in points]),
            max([r.x1 for r in rects] + [p.x for p in points]),
            max([r.y1 for r in rects] + [p.y for p in points]),
        )

    def svg(self) -> str:
        """The file. Raises DrawingError, see `problems`."""
        if not any(text.what == self.title for text in self._texts):
            inner = self.bounds()
            self.text(inner.x0, inner.y0 - 30, self.title, bold=True)
            if self.source:
                left = inner.x0 + text_width(self.title, True) + 24
                self.text(max(inner.x1, left + text_width(self.source)), inner.y0 - 30, self.source, "end", "soft")
        if problems := self.problems():
            raise DrawingError(f"{self.title}: {'; '.join(problems)}")
        r = self.bounds()
        x, y, w, h = r.x0 - MARGIN, r.y0 - MARGIN + 6, r.x1 - r.x0 + 2 * MARGIN, r.y1 - r.y0 + 2 * MARGIN - 6
        if w > MAX_WIDTH:
            raise DrawingError(f"{self.title}: {w:.0f} pixels wide, at most {MAX_WIDTH} are allowed")
        light, dark = ("".join(f"--{name}:{pair[i]};" for name, pair in PALETTE.items()) for i in (0, 1))
        used = sorted(
            {"bg"} | {name for _, part in self._out for name in PALETTE if f"f-{name}" in part or f"s-{name}" in part}
        )
        classes = "".join(  # the plain colour first, for programs that do not know variables
            f".f-{name}{{fill:{PALETTE[name][0]};fill:var(--{name})}}"
            f".s-{name}{{stroke:{PALETTE[name][0]};stroke:var(--{name})}}\n"
            for name in used
        )
        body = "\n".join(part for _, part in sorted(self._out, key=lambda item: item[0]))
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{_n(x)} {_n(y)} {_n(w)} {_n(h)}" width="{_n(w)}" '
            f'height="{_n(h)}" role="img">\n'
            f"<title>{escape(self.title, False)}</title>\n<desc>{escape(self.desc, False)}</desc>\n"
            f"<style>\nsvg{{{light}color-scheme:light dark}}\n@media (prefers-color-scheme: dark){{svg{{{dark}}}}}\n"
            f'text{{font:{SIZE}px "Helvetica Neue",Helvetica,Arial,"Liberation Sans",sans-serif}}\n'
            '.k{font-weight:bold}\n.m{font-family:Menlo,Consolas,"Liberation Mono","DejaVu Sans Mono",monospace}\n'
            f".f-none{{fill:none}}\n{classes}</style>\n"
            f'<rect class="f-bg" x="{_n(x)}" y="{_n(y)}" width="{_n(w)}" height="{_n(h)}" rx="8"/>\n{body}\n</svg>\n'
        )


def _length(a: Point, b: Point) -> float:
    return math.hypot(a.x - b.x, a.y - b.y)


def _toward(a: Point, b: Point, distance: float) -> Point:
    share = distance / max(_length(a, b), 0.001)
    return Point(a.x + share * (b.x - a.x), a.y + share * (b.y - a.y))


def _cross(one: _Line, two: _Line) -> bool:
    """Do two lines cross, or lie on each other? Lines that start or end at the same point may share their way."""
    if {one.points[0], one.points[-1]} & {two.points[0], two.points[-1]}:
        return False
    for a, b in pairwise(one.points):
        thin = Rect(min(a.x, b.x) - 2, min(a.y, b.y) - 2, max(a.x, b.x) + 2, max(a.y, b.y) + 2)
        for c, d in pairwise(two.points):
            straight = a.x == b.x or a.y == b.y
            if straight and thin.crossed_by(c, d, 0):
                return True
            if not straight and _turn(a, b, c) != _turn(a, b, d) and _turn(c, d, a) != _turn(c, d, b):
                return True
    return False


def _turn(a: Point, b: Point, c: Point) -> bool:
    return (b.x - a.x) * (c.y - a.y) > (b.y - a.y) * (c.x - a.x)


# ---------------------------------------------------------------- sequence diagrams


class Sequences:
    """A sequence diagram: who, from left to right, and what they say, from top to bottom."""

    def __init__(self, picture: Picture, who: Sequence[tuple[str, float, str]]) -> None:
        """who: a name, the x of its lifeline, its kind."""
        self.p, self.y = picture, 0.0
        self.x: list[float] = []
        tallest = max(fit(name)[1] for name, _, _ in who) + 2 * PAD - 4
        for name, x, kind in who:
            w, _ = fit(name)
            picture.box(x - w / 2 - PAD, 0, name, h=tallest, kind=kind)
            self.x.append(x)
        self.top = tallest
        self.y = tallest + 18
        self._frames: list[tuple[str, float, float, float, str]] = []

    def say(self, a: int, b: int, text: str, dashed: bool = False, kind: str = "soft") -> None:
        """A message from a to b; to itself if they are the same."""
        extra = (len(text.split("\n")) - 1) * LINE
        xa, xb = self.x[a], self.x[b]
        if a == b:
            self.y += 14
            points = [
                Point(xa, self.y),
                Point(xa + 22, self.y),
                Point(xa + 22, self.y + 16),
                Point(xa + 2, self.y + 16),
            ]
            self.p._lines.append(_Line(points, text, True))
            self.p._out.append((2, self.p._path(points[:3], f"s-{kind}")))
            self.p.arrow(points[2], points[3], kind=kind, crosses=True)
            self.p.text(xa + 32, self.y + 8 - extra / 2, text, kind="ink", halo=True)
            self.y += 22 + extra / 2
            return
        self.y += 24 + extra
        self.p.text((xa + xb) / 2, self.y - 12 - extra, text, "middle", "ink", halo=True)
        self.p.arrow(Point(xa, self.y), Point(xb, self.y), dashed=dashed, kind=kind, crosses=True)
        self.y += 8

    def note(self, a: int, text: str, kind: str = "warn", b: int | None = None) -> Box:
        """A box on the lifeline of a, or in the middle between a and b."""
        w, h = fit(text)
        x = self.x[a] if b is None else (self.x[a] + self.x[b]) / 2
        self.y += 10
        box = self.p.box(x - w / 2 - 8, self.y, text, h=h + 10, pad=8, kind=kind)
        self.y += h + 14
        return box

    def frame(self, label: str, a: int, b: int, left: float = 20, right: float = 20, kind: str = "line") -> None:
        """From here to `end`, what a to b say belongs together."""
        self.y += 12
        self._frames.append((label, self.y, self.x[a] - left, self.x[b] + right, kind))
        self.y += 24

    def end(self) -> None:
        label, top, left, right, kind = self._frames.pop()
        self.y += 10
        self.p._boxes.append(box := Box(Rect(left, top, right, self.y), "group", label))
        self.p._out.append((0, self.p._rect(box.rect, f"f-none s-{kind}", 8)))
        self.p.text(left + 10, top + 14, label, kind="soft", bold=True, owner=box, halo=True)
        self.y += 8

    def finish(self) -> None:
        """Draws the lifelines."""
        for x in self.x:
            self.p.line(Point(x, self.top), Point(x, self.y + 12), dashed=True, crosses=True)


# ---------------------------------------------------------------- state machines


@dataclass(frozen=True)
class Route:
    """How to draw a transition: from which side of one state to which of the other ("r0.3": right, three tenths down)."""

    start: str
    end: str
    label: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


def _side(box: Box, spec: str) -> Point:
    f = float(spec[1:]) if len(spec) > 1 else 0.5
    return {"l": box.l, "r": box.r, "t": box.t, "b": box.b}[spec[0]](f)


def states(
    picture: Picture,
    transitions: Mapping[Any, Iterable[Any]],
    places: Mapping[Any, tuple[float, float, str]],
    routes: Mapping[tuple[Any, Any], Route],
    together: Mapping[str, tuple[Box, frozenset[Any]]] | None = None,
    name: Any = lambda state: state.name,
) -> dict[Any, Box]:
    """Draws a table of transitions. `together`: states to which all go that go to one of them: one arrow for all.

    Raises DrawingError if the table has a state without a place, or a transition without a route; or if there is a route
    that is in the table no more.
    """
    known = set(transitions) | {t for targets in transitions.values() for t in targets}
    if missing := sorted(name(s) for s in known - places.keys()):
        raise DrawingError(f"{picture.title}: no place for the states {missing}")
    if gone := sorted(name(s) for s in places.keys() - known):
        raise DrawingError(f"{picture.title}: a place for states that are not there: {gone}")
    boxes: dict[Any, Box] = {}
    for state, (x, y, kind) in places.items():
        width, _ = fit(f"`{name(state)}`")
        boxes[state] = picture.box(x - width / 2 - 14, y - 17, f"`{name(state)}`", width + 28, 34, kind, radius=17)
    wanted = set()
    for state, targets in transitions.items():
        rest = set(targets)
        for label, (_, members) in (together or {}).items():
            if members <= rest:
                rest -= members
                wanted.add((state, label))
        wanted |= {(state, target) for target in rest}
    if missing := sorted(str(pair) for pair in wanted - routes.keys()):
        raise DrawingError(f"{picture.title}: no route for the transitions {missing}")
    if gone := sorted(str(pair) for pair in routes.keys() - wanted):
        raise DrawingError(f"{picture.title}: a route for transitions that are not there: {gone}")
    for (start, end), route in routes.items():
        target = together[end][0] if together and isinstance(end, str) else boxes[end]
        picture.arrow(_side(boxes[start], route.start), _side(target, route.end), route.label, **route.options)
    return boxes
