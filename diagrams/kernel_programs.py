"""What one program instance of each Triton kernel loads and stores."""

from pathlib import Path

import nanopd
from diagrams.drawing import Picture, Point


def draw() -> Picture:
    """A panel for each kernel: loads on the left, the program, stores on the right."""
    p = Picture(
        "What one program of each Triton kernel loads and stores",
        "Slot mapping: one program a request. KV store: one program a token, all its heads. Paged attention: one "
        "program for a query tile, a KV head and a split of the context, going through the block table to K and V.",
        "nanopd/kernels/: T1",
    )
    folder = Path(nanopd.__file__).parent / "kernels"
    for file, kernel in (
        ("slot_mapping", "_slot_mapping_kernel"),
        ("kv_store", "_store_kv_kernel"),
        ("paged_attention", "_attention_kernel"),
    ):
        assert f"def {kernel}(" in (folder / f"{file}.py").read_text("utf-8")
    # 1: slot mapping
    p.group(0, 0, 950, 168, "`_slot_mapping_kernel`: program r = request r")
    program = p.box(400, 70, "program 1\nof [R]", 130, 60, "accent")
    p.text(16, 54, "`query_start_loc`", kind="soft")
    p.cells(190, 41, [("0", "plain"), ("3", "b"), ("5", "b"), ("8", "plain")], 36, 26)
    p.text(16, 92, "`positions`", kind="soft")
    p.cells(130, 79, [("", "plain")] * 3 + [("9", "b"), ("10", "b")] + [("", "plain")] * 3, 30, 26)
    p.text(16, 130, "`block_table[1]`", kind="soft")
    p.cells(190, 117, [("", "plain"), ("", "plain"), ("7", "b"), ("", "plain")], 36, 26)
    p.arrow(Point(374, 100), program.l(), head=True)
    p.text(600, 70, "`out`: slots of its own tokens", kind="soft")
    p.cells(600, 87, [("", "plain")] * 3 + [("29", "b"), ("30", "b")] + [("", "plain")] * 3, 36, 26)
    p.arrow(program.r(), Point(596, 100))
    p.text(600, 136, "neighbours in memory: coalesced", kind="soft")
    # 2: KV store
    p.group(0, 186, 950, 186, "`_store_kv_kernel`: program t = token t, all KV heads")
    program = p.box(400, 256, "program t\nof [T]", 130, 60, "accent")
    for n, name in enumerate(("key", "value")):
        y = 232 + n * 48
        p.text(16, y + 17, f"`{name}[t]`", kind="soft")
        p.cells(110, y, [(f"head {h}", "b") for h in range(3)], 80, 34)
    p.text(16, 349, "`slots[t]`: -1 stores nothing", kind="soft")
    p.arrow(Point(350, 286), program.l())
    for n, name in enumerate(("k_cache", "v_cache")):
        y = 232 + n * 62
        p.text(600, y, f"`{name}`, block `slot // block_size`", kind="soft")
        p.cells(600, y + 13, [(f"slot {i}", "b" if i == 2 else "plain") for i in range(4)], 80, 30)
    p.arrow(program.r(0.35), Point(596, 260), way="-|-")
    p.arrow(program.r(0.65), Point(596, 322), way="-|-")
    p.text(600, 355, "strides say where: all three layouts", kind="soft")
    # 3: attention
    p.group(0, 390, 950, 282, "`_attention_kernel`: program = query tile x KV head x split of the context")
    program = p.box(400, 490, "program\n(tile, head, split)", 140, 60, "accent")
    p.text(16, 442, "query tile: `[rows, D]`, once", kind="soft")
    for n in range(2):
        p.text(16, 474 + n * 76 + 24, f"token {n}")
        for h in range(4):
            p.box(80, 458 + n * 76 + h * 17, "", 120, 15, "a" if n == 0 else "b", radius=2)
        p.text(210, 458 + n * 76 + 33, "4 heads\nof a group", kind="soft")
    p.arrow(Point(310, 520), program.l())
    p.text(16, 627, "rows x keys: each K/V tile is loaded once\nfor the whole group of heads", kind="soft")
    p.text(600, 442, "block table, then K and V: `[keys, D]`, tile by tile", kind="soft")
    p.cells(600, 458, [("B7", "c"), ("B2", "c"), ("B9", "c")], 60, 28)
    for n, block in enumerate((7, 2, 9)):
        p.box(600 + n * 112, 512, f"K, V of B{block}\n16 slots", 104, 48, "c" if n < 2 else "free")
    p.arrow(Point(596, 520), program.r())
    p.text(600, 580, "only what its queries may see is loaded", kind="soft")
    stores = p.box(600, 606, "stores `out [rows, D]`; with splits\nalso `lse [rows]`, for the merge", 336, 52, "good")
    p.arrow(program.b(), stores.l(), way="|-")
    return p
