"""From a token's position to its slot, filled in by the function that the engine uses."""

import torch

from diagrams.drawing import Picture
from nanopd.worker.attention import AttentionMetadata, CPUAttention

BLOCK_SIZE = 4
TABLES = {"a": [3, 7, 8], "b": [5, 1, 4]}
CONTEXT, NEW = {"a": 5, "b": 9}, {"a": 5, "b": 1}


def slots(positions: list[int]) -> list[int]:
    """What the backend's `plan` writes into `slot_mapping`."""
    lens = [CONTEXT[i] + NEW[i] for i in TABLES]
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, NEW["a"], NEW["a"] + NEW["b"]], dtype=torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        block_table=torch.tensor(list(TABLES.values()), dtype=torch.int32),
        slot_mapping=torch.zeros(len(positions), dtype=torch.int64),
        query_lens_list=list(NEW.values()),
        seq_lens_list=lens,
    )
    CPUAttention().plan(metadata, torch.tensor(positions), BLOCK_SIZE)
    result: list[int] = metadata.slot_mapping.tolist()
    return result


def draw() -> Picture:
    """The flat batch, the tables, and one token's way into the cache."""
    p = Picture(
        "Slot mapping: where a token's K and V go",
        "A flat batch of a prefill chunk of request a and a decode of request b: each position goes through the "
        "block table to a slot of the paged cache (rule K1); numbers from the engine's own function.",
        "K1; the backend's plan, kernels/slot_mapping.py",
    )
    batch = [(i, CONTEXT[i] + k) for i in TABLES for k in range(NEW[i])]
    mapping = slots([position for _, position in batch])
    x0, w = 200, 76
    rows = [
        ("batch: request", [i for i, _ in batch]),
        ("`positions`", [str(q) for _, q in batch]),
        (f"`position // {BLOCK_SIZE}`", [str(q // BLOCK_SIZE) for _, q in batch]),
        ("block, by the table", [f"B{TABLES[i][q // BLOCK_SIZE]}" for i, q in batch]),
        (f"`position % {BLOCK_SIZE}`", [str(q % BLOCK_SIZE) for _, q in batch]),
        ("`slot_mapping`", [str(s) for s in mapping]),
    ]
    for n, (name, values) in enumerate(rows):
        y = n * 36 + (10 if n == 5 else 0)
        p.text(0, y + 15, name)
        colour = n in (0, 5)
        p.cells(x0, y, [(v, i if colour else "plain") for v, (i, _) in zip(values, batch)], w, 30)
    for n, (name, table) in enumerate(TABLES.items()):
        p.text(720, 15 + n * 76, f"block table of {name}")
        p.cells(720, 30 + n * 76, [(f"B{b}", name) for b in table], 56, 30)
    star = 3
    i, q = batch[star]
    assert mapping[star] == TABLES[i][q // BLOCK_SIZE] * BLOCK_SIZE + q % BLOCK_SIZE
    p.text(0, 252, "slot = block_table[position // block_size] * block_size + position % block_size".join("``"))
    p.text(
        0,
        276,
        f"{mapping[star]} = block_table[{q} // {BLOCK_SIZE}] * {BLOCK_SIZE} + {q} % {BLOCK_SIZE} = "
        f"{TABLES[i][q // BLOCK_SIZE]} * {BLOCK_SIZE} + {q % BLOCK_SIZE}".join("``"),
    )
    y = 340
    p.text(
        0,
        y - 26,
        "The paged cache, one layer: slots of blocks 0 to 8. -1 in `slot_mapping` is padding, and nothing is written.",
        kind="soft",
    )
    mine = {s: r for s, (r, _) in zip(mapping, batch)}
    held = {b: name for name, table in TABLES.items() for b in table}
    for block in range(9):
        x = block * 104
        p.text(x + 48, y, f"B{block}", "middle", "ink" if block in held else "soft")
        first = block * BLOCK_SIZE
        there = {TABLES[r][k // BLOCK_SIZE] * BLOCK_SIZE + k % BLOCK_SIZE: r for r in TABLES for k in range(CONTEXT[r])}
        p.cells(
            x,
            y + 14,
            [
                (str(s), mine.get(s) or (f"{there[s]} old" if s in there else "free"))
                for s in range(first, first + BLOCK_SIZE)
            ],
            24,
            30,
        )
    p.legend(
        0, y + 68, [("a", "written in this step for a"), ("b", "for b"), ("a old", "written before"), ("free", "empty")]
    )
    return p
