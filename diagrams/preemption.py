"""The drawing's walk-through of a preemption, played by the real scheduler: table, free queue and hash table."""

from diagrams.drawing import Picture
from diagrams.runs import Run
from nanopd.config import EngineConfig
from nanopd.core.kv_cache import KVCacheManager
from nanopd.trace.events import Cached, Freed
from nanopd.trace.replay import State


def draw() -> Picture:
    """Four moments, one below the other."""
    p = Picture(
        "Preemption: blocks freed, taken, and found again",
        "Request b holds blocks 3, 7, 8, 9 and is preempted for a; when it comes back the first two are found by "
        "their hash, and three others popped from the free queue. Replayed from a real run of the scheduler.",
        "a run of Scheduler and KVCacheManager, block_size 2",
    )
    run = Run(10, 2, (0, 1, 2, 4, 5, 6, 3, 7, 8, 9), EngineConfig())
    run.add("a", 12, max_tokens=5)
    b = run.add("b", 8, max_tokens=3)
    for _ in range(6):
        run.step()
    assert b.metrics.num_preemptions == 1 and b.num_tokens == 10
    hashes = b.block_hashes[:4]
    moments = run.moments(
        lambda event, state: isinstance(event, Cached) and event.request_id == "b",
        lambda event, state: isinstance(event, Freed) and event.request_id == "b",
        lambda event, state: isinstance(event, Freed) and event.request_id == "a",
        lambda event, state: isinstance(event, Cached) and event.request_id == "b",
    )
    words = [
        "1  a and b run, and every block is held.",
        "2  a needs a block and none is free: b, the last of `running`, gives up its own, last block first.",
        "3  a has popped {lost} from the head (their hashes are forgotten), and has ended: its blocks went to the end.",
        "4  b comes back: {hit} found by hash and touched, {new} popped from the head and filled anew.",
    ]
    lost = [i for i in ids(moments[1].kv) if moments[2].kv.pool.blocks[i].block_hash not in hashes][:2]
    table = moments[3].kv.get_block_ids("b")
    hits = [
        i for i in table if any(moments[2].kv.pool.get_cached_block(h) is moments[2].kv.pool.blocks[i] for h in hashes)
    ]
    by_chance = " and ".join(f"B{i}" for i in table[2:4])
    assert hits == table[:2] and table[2:4] == [8, 9] and len(table) == 5
    facts = {
        "lost": " and ".join(f"B{i}" for i in lost),
        "hit": " and ".join(f"B{i}" for i in hits),
        "new": ", ".join(f"B{i}" for i in table if i not in hits),
    }
    rules = [[], ["S3", "K6"], ["K5"], ["S4", "K4", "K5"]]
    for n, (state, text, names) in enumerate(zip(moments, words, rules)):
        y = n * 132
        p.group(0, y, 940, 152 if n == 3 else 116, kind="group")
        end = p.text(14, y + 22, text.format(**facts)).x1 + 14
        for name in names:
            end = p.rule(end, y + 22, name).rect.x1 + 6
        _table(p, 14, y + 48, state, hits if n == 3 else [])
        _free_queue(p, 274, y + 48, state)
        _hashes(p, 700, y + 48, state.kv, hashes)
    p.text(
        14,
        3 * 132 + 118,
        f"{by_chance} are no hits, though they hold h2 and h3 once more: "
        "they stood next in the queue, with a's tokens in them.\n"
        f"B{table[4]} is for b's ninth token, which was sampled in 1.",
        kind="soft",
    )
    y = 4 * 132 + 44
    p.text(
        0,
        y,
        'The drawing (see lesson 02) finds B7 alone. But h1 in B7 means "these tokens, after those of h0": a hit is '
        "always a prefix of the\n"
        "chain, so B7 counts only with B3, and both are found. To be found alone, B7 would have to hold h0\n"
        "(`test_k6_the_drawing_of_blocks_3_7_8_9`). K6 sees to it that the beginning of a chain is the last to go.",
        kind="soft",
    )
    p.legend(
        0,
        y + 68,
        [
            ("a", "held by a"),
            ("b", "held by b"),
            ("accent", "held by b, found by its hash"),
            ("cached", "free, can still be found by its hash"),
        ],
    )
    return p


def ids(kv: KVCacheManager) -> list[int]:
    """The free queue, head first."""
    return [block.block_id for block in kv.pool.free_queue.in_order()]


def _table(p: Picture, x: float, y: float, state: State, hits: list[int]) -> None:
    p.text(x, y, "block table of b", kind="soft")
    table = state.kv.get_block_ids("b")
    if table:
        p.cells(x, y + 16, [(f"B{i}", "accent" if i in hits else "b") for i in table], 44, 32)
    else:
        p.text(x, y + 32, "empty", kind="soft")


def _free_queue(p: Picture, x: float, y: float, state: State) -> None:
    label = p.text(x, y, "`free_queue`", kind="soft")
    order = state.kv.pool.free_queue.in_order()
    if not order:
        p.text(label.x1 + 6, y, "is empty; block table of a", kind="soft")
        p.cells(x, y + 16, [(f"B{i}", "a") for i in state.kv.get_block_ids("a")], 44, 32)
        return
    p.text(label.x1 + 14, y, "head first", kind="soft")
    p.cells(x, y + 16, [(f"B{b.block_id}", "cached" if b.block_hash else "free") for b in order], 38, 32, gap=3)


def _hashes(p: Picture, x: float, y: float, kv: KVCacheManager, hashes: list[bytes]) -> None:
    p.text(x, y, "hash table, entries of b's tokens", kind="soft")
    cells = []
    for i, h in enumerate(hashes):
        block = kv.pool.get_cached_block(h)
        cells.append((f"h{i}: B{block.block_id}", "plain") if block else (f"h{i}: -", "free"))
    p.cells(x, y + 16, cells, 57, 32)
