"""Two requests with a common beginning hold the same physical blocks: a real run of the KVCacheManager."""

from diagrams.drawing import Picture
from diagrams.runs import Run


def draw() -> Picture:
    """A's table on the left, B's on the right, the pool in between."""
    p = Picture(
        "Two requests share the blocks of their common prefix",
        "Requests A and B have eight tokens in common: their block tables name the same two physical blocks, whose "
        "reference count is 2. Block numbers and counts come from a real KVCacheManager.",
        "KVCacheManager, block_size 4",
    )
    run = Run(num_blocks=16, block_size=4, order=(7, 2, 9, 4))
    a = run.add("a", 11)
    run.step()
    b = run.add("b", 11)
    b.token_ids[:8] = a.token_ids[:8]
    b.block_hashes.clear()
    run.kv.update_block_hashes(b)
    run.step()
    tables = {"a": run.kv.get_block_ids("a"), "b": run.kv.get_block_ids("b")}
    shared = [i for i in tables["a"] if i in tables["b"]]
    order = [*shared, tables["a"][-1], tables["b"][-1]]
    p.group(0, 0, 210, 240, "block table of A")
    p.group(360, 0, 220, 240, "physical blocks")
    p.group(730, 0, 210, 240, "block table of B")
    physical = {}
    for n, i in enumerate(order):
        block = run.kv.pool.blocks[i]
        kind = "accent" if block.ref_cnt > 1 else "a" if i in tables["a"] else "b"
        physical[i] = p.box(376, 42 + n * 48, f"block {i}:  `ref_cnt` = {block.ref_cnt}", 188, 36, kind)
    for name, x in (("a", 16), ("b", 746)):
        for n, i in enumerate(tables[name]):
            words = "common prefix" if i in shared else f"suffix of {name.upper()}"
            y = 42 + n * 48 if i in shared or name == "a" else 42 + 3 * 48
            logical = p.box(x, y, f"{name.upper()}{n}: {words}", 178, 36, name)
            if name == "a":
                p.arrow(logical.r(), physical[i].l())
            else:
                p.arrow(logical.l(), physical[i].r())
    p.text(
        0,
        264,
        "B found blocks 7 and 2 by their hashes (K2): `touch` counts one more holder (K4), and nothing is computed "
        "twice.\n"
        "A block goes back to the free queue when its count is 0; then it can still be found until somebody pops it "
        "(K5).",
        kind="soft",
    )
    assert shared == [7, 2] and [run.kv.pool.blocks[i].ref_cnt for i in order] == [2, 2, 1, 1]
    return p
