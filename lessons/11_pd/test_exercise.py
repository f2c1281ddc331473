"""What exercise 11 is graded by. `nanopd grade 11 FILE`, or `pytest` in this folder for exercise.py."""

import tempfile
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any
from unittest.mock import patch

from nanopd.connector.protocol import Layout
from nanopd_lessons import drive
from nanopd_lessons.grading import case

# For each layout: runs and bytes of one block of 2 layers, K and V, 4 tokens, 8 bytes a token in each.
SHAPES = {"kv_first": (4, 32), "blocks_first": (2, 64), "cross_layer": (1, 128)}


def layout(name: str, num_blocks: int) -> Layout:
    return Layout("a model", "float32", name, 4, *SHAPES[name], num_blocks)


def scattered(random: Random, count: int, num_blocks: int) -> list[int]:
    """Block ids in which short rows of neighbours occur, in mixed order."""
    rows = [[*range(i, i + random.randint(1, 4))] for i in range(0, num_blocks - 5, 6)]
    random.shuffle(rows)
    return [i for row in rows for i in row][:count]


@case(points=2, hint="Which block does the next token of the prompt go into? And if there is no next token?")
def test_ready(student: ModuleType, random: Random) -> Any:
    """Full blocks are ready; the last one when the prompt is whole, full or not"""
    size, seen = random.choice([2, 4, 16]), {}
    table = random.sample(range(100), 20)
    for num_tokens in (random.randint(size + 1, 10 * size) for _ in range(6)):
        for computed in sorted({0, 1, size, num_tokens // 2, num_tokens - 1, num_tokens}):
            ready = student.blocks_ready(table, computed, num_tokens, size)
            seen[f"{computed} of {num_tokens} tokens, {size} a block"] = list(ready)
    return seen


@case(
    points=2,
    hint="`ready` counts from the start of the prompt, `theirs` from `first_block`. Draw both as rows of boxes.",
)
def test_pairs(student: ModuleType, random: Random) -> Any:
    """Only what D lacks and what is not written yet, each of P's blocks with the right one of D's"""
    table, theirs, seen = random.sample(range(100), 12), random.sample(range(100, 200), 12), {}
    for first in (0, random.randint(1, 5), 11):
        for sent in (0, random.randint(1, 7)):
            for ready in (table, table[: random.randint(6, 11)]):
                pairs = student.pair_up(ready, sent, first, theirs[first:])
                seen[f"{len(ready)} ready, {sent} sent, D has {first}"] = [list(pair) for pair in pairs]
    return seen


@case(points=2, hint="How far is it from one run of a block to its next run? Is it as far on the other side?")
def test_addresses(student: ModuleType, random: Random) -> Any:
    """One block in each of the three layouts, between pools of different sizes"""
    seen = {}
    for name in SHAPES:
        here, there = layout(name, random.randint(8, 20)), layout(name, random.randint(21, 40))
        bases, ids = [random.randrange(10**6, 10**9) for _ in range(2)], [random.randrange(8) for _ in range(2)]
        pieces = student.pieces_of(here, bases[0], ids[:1], there, bases[1], ids[1:])
        seen[name] = [list(piece) for piece in pieces]
    return seen


@case(points=2, hint="Two pieces are one only if they touch here *and* there. When do you see that two of them touch?")
def test_merging(student: ModuleType, random: Random) -> Any:
    """In a row, scattered here, scattered there, in any order: as few pieces as possible"""
    seen: dict[str, Any] = {}
    for name in SHAPES:
        here, there = layout(name, 60), layout(name, 70)
        row, mixed, other = [*range(7, 22)], scattered(random, 15, 60), scattered(random, 15, 70)
        backwards = [*zip(row, range(30, 45))][::-1]
        for title, ids, to_ids in (
            ("in a row on both sides", row, row),
            ("scattered here", mixed, row),
            ("scattered there", row, other),
            ("scattered on both sides", mixed, mixed),
            ("the same backwards", [a for a, _ in backwards], [b for _, b in backwards]),
        ):
            pieces = student.pieces_of(here, 1000, ids, there, 500_000, to_ids)
            seen[f"{name}, {title}"] = [list(piece) for piece in pieces]
    return seen


@case(points=3, hint="Play it on paper with 3 blocks of 4 tokens and chunks of 5: what is written after each chunk?")
def test_a_prompt_in_chunks(student: ModuleType, random: Random) -> Any:
    """A prompt computed in chunks: all of its bytes arrive, each once, and nothing else of D is touched"""
    seen = {}
    for name, (num_runs, run_bytes) in SHAPES.items():
        here, there = layout(name, 30), layout(name, 40)
        mine = bytearray(random.randbytes(30 * num_runs * run_bytes))
        theirs = bytearray(40 * num_runs * run_bytes)
        num_tokens, first = random.randint(30, 47), random.randint(0, 3)
        count = -(-num_tokens // 4)
        table, to = scattered(random, count + 1, 30), scattered(random, count, 40)[first:]
        computed, sent, written, num_pieces, outside = 0, 0, 0, 0, 0
        while computed < num_tokens:
            computed = min(num_tokens, computed + random.randint(1, 13))
            ready = student.blocks_ready(table, computed, num_tokens, 4)
            pairs = student.pair_up(ready, sent, first, to)
            sent = max(sent, len(ready))
            for source, target, size in student.pieces_of(
                here, 0, [pair[0] for pair in pairs], there, 0, [pair[1] for pair in pairs]
            ):
                num_pieces += 1
                if size > 0 and 0 <= source <= len(mine) - size and 0 <= target <= len(theirs) - size:
                    theirs[target : target + size] = mine[source : source + size]
                    written += size
                else:
                    outside += 1
        expected = dict(zip(to, table[first:]))
        wrong = set()
        for block in range(40):
            for r in range(num_runs):
                run = theirs[(r * 40 + block) * run_bytes :][:run_bytes]
                at = (r * 30 + expected.get(block, 0)) * run_bytes
                if run != (mine[at : at + run_bytes] if block in expected else bytes(run_bytes)):
                    wrong.add(block)
        facts = f"{name}: {num_tokens} tokens, D has {first} blocks"
        seen[facts] = {"bytes written": written, "pieces outside of the memory": outside, "pieces": num_pieces}
        seen[facts] |= {"blocks of D that are wrong": sorted(wrong)}
    return seen


def generate(student: ModuleType, random: Random, name: str) -> Any:
    """P and D, real engines, the student's `pieces_of` in the real producer, bytes really copied."""
    small = layout(name, 4)
    student.pieces_of(small, 0, [0], small, 0, [0])  # if it is not written yet, this says so
    shared = [random.randrange(10, 290) for _ in range(16)]
    prompts = {f"r{i}": [random.randrange(10, 290) for _ in range(random.randint(9, 60))] for i in range(3)}
    prompts["D has its beginning"] = [*shared, *(random.randrange(10, 290) for _ in range(random.randint(9, 30)))]
    with (
        tempfile.TemporaryDirectory() as directory,
        drive.in_memory(),
        patch("nanopd.connector.producer.pieces_of", student.pieces_of),
    ):
        model = drive.tiny_model(Path(directory))
        p, d = (
            drive.Node(model, role, kv_layout=name, num_blocks=n) for role, n in (("prefill", 100), ("decode", 130))
        )
        try:
            d.add("warm", [*shared, 1], max_tokens=1)
            drive.run_nodes(d)
            d.order_free_queue(scattered(random, 60, 120))
            for request_id, prompt in prompts.items():
                p.prefill(request_id, prompt)
                d.decode(request_id, prompt, p)
            drive.run_nodes(p, d)
            sent, received = p.core.connector.stats(), d.core.connector.stats()
        finally:
            p.core.close()
            d.core.close()
    moved = {"bytes": sent.sent_bytes, "pieces": sent.sent_pieces, "transfers that failed": sent.send_failures}
    return {"tokens of D": d.tokens, "transfers that came": received.received} | moved


REAL = (
    "The real producer sends your pieces. Did transfers fail? Then an address lies outside of the memory. Do only tokens "
    "differ? Then bytes came to a wrong place."
)


@case(points=2, hint=REAL, seconds=60)
def test_real_cross_layer(student: ModuleType, random: Random) -> Any:
    """Two real engines, layout cross_layer: the tokens of one engine, and no piece too many"""
    return generate(student, random, "cross_layer")


@case(points=4, hint=REAL, seconds=60)
def test_real_layers(student: ModuleType, random: Random) -> Any:
    """Two real engines, layouts kv_first and blocks_first"""
    return {name: generate(student, random, name) for name in ("kv_first", "blocks_first")}
