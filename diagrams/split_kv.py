"""A long context cut into splits, and the merge by log-sum-exp; worked out on eight keys."""

import math

from diagrams.drawing import Picture, Point

SCORES = [1.0, 3.0, 0.5, 2.0, -1.0, 0.0, 4.0, 2.5]
VALUES = [10, 20, 30, 40, 50, 60, 70, 80]


def part(scores: list[float], values: list[int]) -> tuple[float, float]:
    """What one program stores: its output divided by its own sum, and the logarithm of that sum."""
    total = sum(math.exp(s) for s in scores)
    return sum(math.exp(s) * v for s, v in zip(scores, values)) / total, math.log(total)


def draw() -> Picture:
    """Keys, splits, merge."""
    p = Picture(
        "Split KV: several programs share one long context",
        "Eight keys in four splits: each program stores its own softmax output and the logarithm of its sum; the "
        "merge weighs them by exp(lse - max) and gives what one program would have given.",
        "T1; kernels/paged_attention.py",
    )
    w = 110
    for y, name in ((15, "keys of one request"), (59, "score q k"), (103, "value v")):
        p.text(0, y, name)
    kinds = ["a", "b", "c", "d"]
    p.cells(160, 0, [(f"key {i}", kinds[i // 2]) for i in range(8)], w - 12, 30)
    p.cells(160, 44, [f"{s:g}" for s in SCORES], w - 12, 30)
    p.cells(160, 88, [f"{v}" for v in VALUES], w - 12, 30)
    parts = [part(SCORES[i : i + 2], VALUES[i : i + 2]) for i in range(0, 8, 2)]
    top = max(lse for _, lse in parts)
    weights = [math.exp(lse - top) for _, lse in parts]
    merged = sum(weight * out for weight, (out, _) in zip(weights, parts)) / sum(weights)
    whole, lse_whole = part(SCORES, VALUES)
    assert math.isclose(merged, whole) and math.isclose(top + math.log(sum(weights)), lse_whole)
    p.text(0, 172, "one program a split:\nits `out` and `lse`")
    p.text(0, 252, "weight in the merge")
    merge = p.box(330, 316, f"merge: sum of weight x out / sum of weights = {merged:.2f}", 444, 44, "accent")
    for n, ((out, lse), weight) in enumerate(zip(parts, weights)):
        x = 160 + n * 2 * (w - 12)
        box = p.box(x + 8, 156, f"split {n}:  out {out:.2f}\nlse {lse:.3f}", 180, 56, kinds[n])
        second = p.box(x + 8, 236, f"exp(lse - {top:.3f}) = {weight:.3f}", 180, 34)
        p.arrow(box.b(), second.t())
        p.arrow(second.b(), merge.t(), way="|-|", bend=294)
        p.arrow(Point(box.t().x, 118), box.t())
    p.text(
        0,
        384,
        f"One softmax over all eight keys gives {whole:.2f} as well: how the keys are dealt out does not "
        f"matter, so the same merge serves\n"
        "a common prefix and the rest (cascade). Subtracting the largest `lse` keeps the exponentials from "
        "overflowing.",
        kind="soft",
    )
    return p
