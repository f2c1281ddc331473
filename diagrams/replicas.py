"""A router before several engines: what it knows of each, and how it chooses."""

from diagrams.drawing import Picture, Point
from nanopd.serve.router import POLICIES, Node


def draw() -> Picture:
    """Above our router with P and D nodes, below the same idea with several GPUs a replica."""
    p = Picture(
        "Replicas and a router",
        "The router sends each completion to a D and with it to a P, by round robin, load or known prefix; a node "
        "that fails gets nothing until it answers again. In larger engines a replica is itself several GPUs.",
        "nanopd/serve/router.py: P6, P8",
    )
    assert {"health", "calls", "seen"} <= set(Node.__dataclass_fields__)
    client = p.box(0, 88, "clients", 80, 44)
    router = p.box(150, 70, "router\none address", 130, 80, "accent")
    p.arrow(client.r(), router.l())
    nodes = [("P 0", "a"), ("P 1", "a"), ("D 0", "b"), ("D 1", "b")]
    boxes = []
    for i, (name, kind) in enumerate(nodes):
        box = p.box(400, i * 58, f"{name}: server, engine core", 230, 42, kind)
        boxes.append(box)
        p.arrow(router.r(), box.l(), way="-|-", bend=340)
    p.arrow(boxes[1].r(), boxes[3].r(), "KV blocks, P to D\n(one pair of many)", "-|-", bend=660, on=1)
    p.table(
        0,
        250,
        [
            [
                "policy",
                "a node costs, for each request in flight",
                "and saves, times the share of the prompt that it has seen",
            ],
            *([f"`{name}`", f"{load:g}", f"{prefix:g}"] for name, (load, prefix) in POLICIES.items()),
        ],
        (160, 320, 420),
    )
    y = 400
    p.text(
        0,
        y,
        "In a larger engine a replica is several GPUs (tensor parallel), and replicas may share a KV store",
        bold=True,
    )
    for n in (0, 1):
        x = n * 486
        p.group(x, y + 20, 450, 160, f"replica {n}, TP = 2")
        core = p.box(x + 16, y + 58, f"engine core {n}", 130, 44, "accent")
        gpus = [
            p.box(x + 250, y + 52 + k * 66, f"GPU {2 * n + k}: part of\neach layer and its KV", 180, 48, "c")
            for k in (0, 1)
        ]
        for gpu in gpus:
            p.arrow(core.r(), gpu.l(), way="-|-")
        p.arrow(gpus[0].b(), gpus[1].t(), both=True)
        p.arrow(core.b(), Point(x + 81, y + 212), dashed=True, both=True)
    p.box(0, y + 212, "shared KV store, and an index of who has what (optional)", 936, 40, "warn")
    return p
