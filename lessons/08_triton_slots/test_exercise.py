"""What exercise 08 is graded by. `nanopd grade 08 FILE`, or `pytest` in this folder for exercise.py."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from nanopd.kernels.kv_store import store_kv
from nanopd_lessons import drive, grading
from nanopd_lessons.grading import case, generate

LAYOUTS = {  # where (block, kv, layer, slot, head, dim) stand in memory, for a cache of 3 layers of which we use the second
    "kv_first": (2, 1, 0, 3, 4, 5),
    "blocks_first": (2, 0, 1, 3, 4, 5),
    "cross_layer": (0, 2, 1, 3, 4, 5),
}
UNTOUCHED = -77


@contextlib.contextmanager
def kernels_of(student: ModuleType) -> Iterator[None]:
    """The engine launches the student's kernels. What goes wrong inside one comes out as it was raised."""
    ours = "nanopd.kernels"
    with (
        patch(f"{ours}.slot_mapping._slot_mapping_kernel", student.slot_mapping_kernel),
        patch(f"{ours}.kv_store._store_kv_kernel", student.store_kv_kernel),
    ):
        try:
            yield
        except Exception as error:
            cause: BaseException = error
            while type(cause).__name__ == "InterpreterError" and cause.__cause__:
                cause = cause.__cause__
            raise cause from None


def stored(
    student: ModuleType, random: Random, slots: list[int], heads: int, dim: int, layout: str = "kv_first",
    fused: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Which bytes of a whole cache change when these slots are written. Every number that is stored is a different one."""
    block_size, blocks, layers = 4, 5, 3
    sizes = (blocks, 2, layers, block_size, heads, dim)
    order = LAYOUTS[layout]
    memory = torch.full([sizes[i] for i in order], UNTOUCHED, dtype=torch.int32)
    by_block = memory.permute([order.index(i) for i in range(6)])
    numbers = list(range(1, 1 + len(slots) * 2 * (heads + 1) * dim))
    random.shuffle(numbers)
    tensor = torch.tensor(numbers, dtype=torch.int32).view(len(slots), 2 * (heads + 1), dim)
    if fused:  # one head of something else before the keys, one before the values
        key, value = tensor[:, 1 : heads + 1], tensor[:, heads + 2 :]
    else:
        key, value = tensor[:, :heads].contiguous(), tensor[:, heads + 2 :].contiguous()
    with kernels_of(student):
        store_kv(key, value, by_block[:, 0, 1], by_block[:, 1, 1], torch.tensor(slots))
    flat = memory.flatten()
    where = (flat != UNTOUCHED).nonzero().flatten().tolist()
    return {"elements that changed": len(where), "they are": where, "and hold": [int(flat[i]) for i in where]}


def mapped(student: ModuleType, lengths: list[tuple[int, int]], block_size: int, tile: int, random: Random, most: int):
    """The slots of a batch of (new tokens, tokens in all). Behind the used part of each table stands garbage."""
    starts, positions = [0], []
    widest = max(-(-total // block_size) for _, total in lengths) + 2
    table = torch.full((len(lengths), widest + 3), -(2**31), dtype=torch.int32)
    for row, (new, total) in enumerate(lengths):
        used = -(-total // block_size)
        table[row, :used] = torch.tensor([random.randrange(most) for _ in range(used)], dtype=torch.int32)
        positions += range(total - new, total)
        starts.append(len(positions))
    out = torch.full((len(positions) + 5,), UNTOUCHED)
    args = torch.tensor(positions), torch.tensor(starts, dtype=torch.int32), table[:, :widest], out
    with kernels_of(student), drive.accesses() as seen:
        student.slot_mapping_kernel[(len(lengths),)](*args, table.stride(0), BLOCK_SIZE=block_size, TILE=tile)
    unused = {table.data_ptr() + 4 * i for i, number in enumerate(table.flatten().tolist()) if number < 0}
    return {"slots": out.tolist(), "loads of unused entries": sum(a in unused for one in seen for a in one.addresses)}


@case(points=2, hint="K1, for a whole array of tokens at once. Which request are you, and where do its tokens begin?")
def test_slots(student: ModuleType, random: Random) -> Any:
    """Slots of a mixed batch follow K1, each request by its own row of the table"""
    lengths = [(random.randint(1, 6), random.randint(6, 30)) for _ in range(3)] + [(1, 1), (0, 0), (1, 9)]
    return mapped(student, lengths, block_size=4, tile=16, random=random, most=100)


@case(
    points=2,
    hint="A chunk may be longer than TILE, and it hardly ever ends where a tile ends. What do the other lanes do?",
)
def test_long_chunks(student: ModuleType, random: Random) -> Any:
    """Requests longer than a tile; nothing is loaded or written beyond their ends"""
    lengths = [(random.randint(17, 40), 41), (8, 8), (9, random.randint(9, 30))]
    return mapped(student, lengths, block_size=4, tile=8, random=random, most=100)


@case(points=1, hint="How large is the largest number that an int32 holds, and how large is this slot?")
def test_large_slots(student: ModuleType, random: Random) -> Any:
    """Slots beyond 2^31, in caches with very many blocks"""
    return mapped(student, [(3, 3), (1, 20)], block_size=16, tile=4, random=random, most=2**31 - 1)


@case(points=2, hint="Slot 9 in blocks of 4: which block, which row? And each program has a token of its own.")
def test_store(student: ModuleType, random: Random) -> Any:
    """Keys and values land in their slots, and nowhere else"""
    return stored(student, random, random.sample(range(20), 6), heads=2, dim=8)


@case(points=2, hint="A program whose slot is -1 has one thing to do. What does the kernel write if it goes on?")
def test_padding(student: ModuleType, random: Random) -> Any:
    """Slot -1 writes nothing, not even just before the cache"""
    slots = [-1, *random.sample(range(20), 3), -1, -1, 19]
    return stored(student, random, slots, heads=2, dim=8, layout=random.choice(list(LAYOUTS)))


@case(
    points=2, hint="tl.arange wants a power of two; 3 and 5 and 12 are none. Heads and dims each need their own limit."
)
def test_odd_sizes(student: ModuleType, random: Random) -> Any:
    """Head counts and head dims that are no powers of two"""
    return [
        stored(student, random, random.sample(range(20), 4), heads, dim)
        for heads, dim in ((3, 8), (2, random.choice((10, 12))), (5, 6))
    ]


@case(points=3, hint="Each stride that you are given differs between the layouts. Which one did you work out yourself?")
def test_layouts(student: ModuleType, random: Random) -> Any:
    """All three layouts, the second of three layers"""
    slots = random.sample(range(20), 5)
    return {layout: stored(student, random, slots, heads=3, dim=4, layout=layout) for layout in LAYOUTS}


@case(
    points=2, hint="Key and value are slices of one product here, with strides of their own. Where does token 1 begin?"
)
def test_fused(student: ModuleType, random: Random) -> Any:
    """Keys and values that are not contiguous, and heads of the cache that are not neighbours"""
    found = stored(student, random, random.sample(range(20), 5), heads=2, dim=8, layout="blocks_first", fused=True)
    heads_first = torch.full((2, 3, 2, 4, 8), UNTOUCHED)  # (kv, block, head, slot, dim): heads are 4 x 8 elements apart
    k_cache, v_cache = heads_first.transpose(2, 3)
    key, value = torch.arange(2 * 3 * 2 * 8).view(2, 2, 3, 8).transpose(1, 2)  # and in key and value 3 x 8
    with kernels_of(student):
        store_kv(key, value, k_cache, v_cache, torch.tensor(random.sample(range(12), 3)))
    return {"fused": found, "heads first": heads_first.flatten().tolist()}


@case(points=4, hint="All the cases above are small pieces of this one: find the first of them that fails.", seconds=60)
def test_real_engine(student: ModuleType, random: Random) -> Any:
    """Your kernels serve real tokens: chunks, decodes, a prefix hit, in one of the layouts"""
    shared = [random.randrange(10, 290) for _ in range(16)]
    prompts = [shared + [random.randrange(10, 290) for _ in range(random.randint(1, 9))] for _ in range(2)]
    options = {"kv_layout": random.choice(list(LAYOUTS)), "max_num_batched_tokens": 20, "attention_backend": "triton"}
    with tempfile.TemporaryDirectory() as folder, patch.object(grading, "model", lambda: Path(folder)):
        drive.tiny_model(Path(folder))  # also where the default model is at hand: interpreted, that one takes minutes
        with kernels_of(student):
            return options | generate(prompts, max_tokens=3, **options)
