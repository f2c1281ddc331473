"""The hash chain of a prompt and what the hash table makes of it, with the real hash function."""

from diagrams.drawing import Picture
from diagrams.runs import Run
from nanopd.core.kv_cache import HASH_SEED, hash_block


def draw() -> Picture:
    """Tokens, blocks, hashes, table; then what two other prompts find."""
    p = Picture(
        "A hash names a block and all that comes before it",
        "Each full block's hash covers its tokens and the hash before it, so equal hashes mean equal prefixes; a prompt "
        "that differs in its fourth block finds the first three. Hashes from hash_block, blocks from a real "
        "KVCacheManager.",
        "nanopd/core/kv_cache.py: hash_block, get_computed_blocks",
    )
    run = Run(num_blocks=16, block_size=2, order=(3, 7, 8, 9, 4))
    a = run.add("a", 9)
    run.kv.allocate_slots(a, 0, 9)
    table = run.kv.get_block_ids("a")
    w, x0 = 164, 128
    p.text(0, 14, "tokens of a")
    p.text(0, 64, "block table")
    p.text(0, 128, "hashes (K2, K3)")
    before = p.box(0, 154, f"`h_-1 = {HASH_SEED.hex()[:6]}…`\na seed", h=48, kind="plain", pad=6)
    parent = HASH_SEED
    for i, block in enumerate(table):
        x = x0 + i * w + 44
        full = i < len(a.block_hashes)
        own = 2 if full else 1
        p.cells(x, 0, [(f"t{2 * i + k}", "a") for k in range(own)], 50, 28)
        if full:
            assert a.block_hashes[i] == hash_block(parent, a.token_ids[2 * i : 2 * i + 2].tobytes())
            parent = a.block_hashes[i]
            held = p.box(x, 48, f"B{block}", 100, 30, "a", radius=3)
            now = p.box(
                x - 12,
                154,
                f"`h{i} = {parent.hex()[:6]}…`\n`H(h{i - 1 if i else '_-1'}, t{2 * i}, t{2 * i + 1})`",
                138,
                48,
                "accent",
                pad=4,
            )
            p.arrow(held.b(), now.t((x + 50 - now.rect.x0) / 138))
            p.arrow(before.r(), now.l())
            before = now
        else:
            p.box(x, 48, f"B{block}", 50, 30, "a", radius=3)
            p.text(x, 100, "not full:", kind="soft")
            p.text(x, 119, "no hash", kind="soft")
    y = 246
    found = {h.hex()[:6]: block.block_id for h, block in run.kv.pool.cached_block_hash_to_block.items()}
    p.text(0, y, "`cached_block_hash_to_block`", kind="soft")
    p.table(0, y + 16, [["hash", "block"], *([f"`{h}…`", f"B{b}"] for h, b in found.items())], (130, 90))
    p.text(
        300, y, "`get_computed_blocks` of others: a run of hits from the start, never all of the tokens", kind="soft"
    )
    prompts = {
        "same 8 tokens": list(a.token_ids[:8]),
        "same 6, then others": [*a.token_ids[:6], 1, 2, 3],
        "other first token": [1, *a.token_ids[1:8]],
    }
    for n, (name, tokens) in enumerate(prompts.items()):
        other = run.add("bcd"[n], 1)
        run.scheduler.waiting.remove(other)
        other.token_ids = a.token_ids[:0]
        other.token_ids.extend(tokens)
        run.kv.update_block_hashes(other)
        hits = run.kv.get_computed_blocks(other)
        top = y + 20 + n * 46
        p.text(300, top + 16, name)
        for i in range(len(tokens) // 2):
            hit = i < len(hits)
            p.box(
                440 + i * 70,
                top,
                f"B{hits[i].block_id}" if hit else "miss" if i == len(hits) else "-",
                62,
                32,
                "accent" if hit else "free",
            )
        why = ["the last token must be computed", "h3 differs", "h0 differs, so all differ"][n]
        p.text(735, top + 16, why, kind="soft")
    return p
