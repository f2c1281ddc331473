"""The seed's walk-through of a preemption, played by the real scheduler: table, free queue and hash table."""

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
        "Request a holds blocks 3, 7, 8, 9 and is preempted for b; when it comes back the first two are found by "
        "their hash and the others popped from the free queue. Replayed from a real run of the scheduler.",
        "a run of Scheduler and KVCacheManager, block_size 2",
    )
    run = Run(10, 2, (0, 1, 2, 4, 5, 6, 3, 7, 8, 9), EngineConfig())
    run.add("b", 12, max_tokens=5)
    a = run.add("a", 8, max_tokens=3)
    for _ in range(6):
        run.step()
    assert a.metrics.num_preemptions == 1
    hashes = a.block_hashes[:4]
    moments = run.moments(
        lambda event, state: isinstance(event, Cached) and event.request_id == "a",
        lambda event, state: isinstance(event, Freed) and event.request_id == "a",
        lambda event, state: isinstance(event, Freed) and event.request_id == "b",
        lambda event, state: isinstance(event, Cached) and event.request_id == "a",
    )
    words = [
        "1  a and b run, and every block is held.",
        "2  b needs a block and none is free: a, the last of `running`, gives up its own, last block first.",
        "3  b has popped {lost} from the head (their hashes are forgotten), and has ended: its blocks went to the end.",
        "4  a comes back: {hit} found by hash and touched, {new} popped from the head and computed again.",
    ]
    lost = [i for i in ids(moments[1].kv) if moments[2].kv.pool.blocks[i].block_hash not in hashes][:2]
    table = moments[3].kv.get_block_ids("a")
    hits = [
        i for i in table if any(moments[2].kv.pool.get_cached_block(h) is moments[2].kv.pool.blocks[i] for h in hashes)
    ]
    facts = {
        "lost": " and ".join(f"B{i}" for i in lost),
        "hit": " and ".join(f"B{i}" for i in hits),
        "new": ", ".join(f"B{i}" for i in table if i not in hits),
    }
    rules = [[], ["S3", "K6"], ["K5"], ["S4", "K4", "K5"]]
    for n, (state, text, names) in enumerate(zip(moments, words, rules)):
        y = n * 132
        p.group(0, y, 940, 116, kind="group")
        end = p.text(14, y + 22, text.format(**facts)).x1 + 14
        for name in names:
            end = p.rule(end, y + 22, name).rect.x1 + 6
        _table(p, 14, y + 48, state, hits if n == 3 else [])
        _free_queue(p, 274, y + 48, state)
        _hashes(p, 700, y + 48, state.kv, hashes)
    y = 4 * 132 + 6
    p.text(
        0,
        y,
        'The seed\'s drawing finds B7 alone. But h1 in B7 means "these tokens, after those of h0": a hit is '
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
            ("accent", "held by a, found by its hash"),
            ("cached", "free, can still be found by its hash"),
        ],
    )
    return p


def ids(kv: KVCacheManager) -> list[int]:
    """The free queue, head first."""
    return [block.block_id for block in kv.pool.free_queue.in_order()]


def _table(p: Picture, x: float, y: float, state: State, hits: list[int]) -> None:
    p.text(x, y, "block table of a", kind="soft")
    table = state.kv.get_block_ids("a")
    if table:
        p.cells(x, y + 16, [(f"B{i}", "accent" if i in hits else "a") for i in table], 44, 32)
    else:
        p.text(x, y + 32, "empty", kind="soft")


def _free_queue(p: Picture, x: float, y: float, state: State) -> None:
    label = p.text(x, y, "`free_queue`", kind="soft")
    order = state.kv.pool.free_queue.in_order()
    if not order:
        p.text(label.x1 + 6, y, "is empty; block table of b", kind="soft")
        p.cells(x, y + 16, [(f"B{i}", "b") for i in state.kv.get_block_ids("b")], 44, 32)
        return
    p.text(label.x1 + 14, y, "head first", kind="soft")
    p.cells(x, y + 16, [(f"B{b.block_id}", "cached" if b.block_hash else "free") for b in order], 38, 32, gap=3)


def _hashes(p: Picture, x: float, y: float, kv: KVCacheManager, hashes: list[bytes]) -> None:
    p.text(x, y, "hash table, entries of a's tokens", kind="soft")
    cells = []
    for i, h in enumerate(hashes):
        block = kv.pool.get_cached_block(h)
        cells.append((f"h{i}: B{block.block_id}", "plain") if block else (f"h{i}: -", "free"))
    p.cells(x, y + 16, cells, 57, 32)
