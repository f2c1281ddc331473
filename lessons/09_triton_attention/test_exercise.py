"""What exercise 09 is graded by. `nanopd grade 09 FILE`, or `pytest` in this folder for exercise.py."""

from random import Random
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from nanopd.worker.attention import CPUAttention
from nanopd_lessons.grading import case, generate

INF = float("inf")


def plain(tensor: Tensor) -> Any:
    """Nested lists of numbers; what is no number as a word."""
    if tensor.ndim:
        return [plain(part) for part in tensor]
    number = tensor.item()
    return number if abs(number) < INF else str(number)


def numbers(random: Random, *shape: int, spread: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(random.randrange(2**31))) * spread


def after(state: Any) -> dict[str, Any]:
    return dict(zip(("maximum", "sum", "weighted values"), map(plain, state)))


@case(
    points=2,
    hint="What was summed before is in terms of the old maximum. Which factor puts it in terms of the new one?",
)
def test_update(student: ModuleType, random: Random) -> Any:
    """The state is right after each tile, whichever way the maximum goes"""
    state, seen = student.nothing_seen(3, 4), []
    for keys in (random.randint(2, 5), random.randint(2, 5), 1):
        state = student.update(state, numbers(random, 3, keys, spread=3), numbers(random, keys, 4))
        seen.append(after(state))
    return seen


@case(points=2, hint="exp(-inf - (-inf)): what is that? A row that has seen nothing needs something else to subtract.")
def test_rows_that_see_nothing(student: ModuleType, random: Random) -> Any:
    """Rows of -inf: in the first tile, between others, in all of them"""
    state, seen = student.nothing_seen(4, 2), []
    for hidden in ([0, 3], [1, 3], [3], [0, 1, 3]):
        scores = numbers(random, 4, 3)
        scores[hidden] = -INF
        scores[2, random.randrange(3)] = -INF
        state = student.update(state, scores, numbers(random, 3, 2))
        seen.append(after(state))
    out, lse = student.finish(state)
    return {"states": seen, "out": plain(out), "lse": plain(lse)}


@case(points=2, hint="exp of anything above 88 is infinite in float32. No score may get into exp() as it is.")
def test_large_scores(student: ModuleType, random: Random) -> Any:
    """Scores of hundreds, of either sign, in update and in merge"""
    parts = []
    for offset in (random.uniform(300, 900), -random.uniform(300, 900)):
        state = student.nothing_seen(2, 3)
        for _ in range(3):
            state = student.update(state, numbers(random, 2, 4) + offset, numbers(random, 4, 3))
        parts.append(student.finish(state))
    outs, lses = (torch.stack(list(both)) for both in zip(*parts))
    near = lses - lses.max() + torch.tensor([[random.uniform(200, 300)], [random.uniform(600, 700)]])
    close = lses * 0 + torch.tensor([[500.0], [random.uniform(500, 501)]])
    found = {"parts": [(plain(out), plain(lse)) for out, lse in parts]}
    for name, weights in (("far apart", lses), ("shifted", near), ("close", close)):
        out, lse = student.merge(outs, weights)
        found[name] = plain(out), plain(lse)
    return found


@case(points=3, hint="The log of a part's sum tells how much the part weighs. What does a part that saw nothing weigh?")
def test_merge(student: ModuleType, random: Random) -> Any:
    """Parts of unequal weight, with empty ones among them, and a row in which all are empty"""
    outs, lses = numbers(random, 4, 3, 2), numbers(random, 4, 3, spread=2)
    lses[random.randrange(4), 0] = -INF
    lses[:, 2] = -INF
    outs[lses.isneginf()] = 0
    out, lse = student.merge(outs, lses)
    one, one_lse = student.merge(outs[:1], lses[:1])
    return {"out": plain(out), "lse": plain(lse), "of one part": plain(one), "lse of one part": plain(one_lse)}


def attended(
    student: ModuleType, random: Random, tokens: int, seq_len: int, heads: int, kv_heads: int, splits: int, tile: int
) -> dict[str, Any]:
    """One request in a cache that holds NaN wherever it has no token, and a table with garbage at its end."""
    block_size, dim, num_blocks = 4, 6, 20
    k_cache, v_cache = torch.full((2, num_blocks, block_size, kv_heads, dim), float("nan"))
    used = -(-seq_len // block_size)
    table = torch.full((used + 3,), 2**30, dtype=torch.int32)
    table[:used] = torch.tensor(random.sample(range(num_blocks), used), dtype=torch.int32)
    j = torch.arange(seq_len)
    at = table[j // block_size].long(), j % block_size
    k_cache[at], v_cache[at] = numbers(random, seq_len, kv_heads, dim), numbers(random, seq_len, kv_heads, dim)
    query = numbers(random, tokens, heads, dim)
    most_keys, num_parts = 0, set()
    update, merge = student.update, student.merge

    def watch_update(state: Any, scores: Tensor, values: Tensor) -> Any:
        nonlocal most_keys
        most_keys = max(most_keys, scores.shape[-1])
        return update(state, scores, values)

    def watch_merge(outs: Tensor, lses: Tensor) -> Any:
        num_parts.add(outs.shape[0])
        return merge(outs, lses)

    with patch.object(student, "update", watch_update), patch.object(student, "merge", watch_merge):
        out = student.attend(query, k_cache, v_cache, table, seq_len, 0.7, splits, tile)
    return {"out": plain(out), "most keys in a tile": most_keys, "parts that were merged": sorted(num_parts)}


@case(points=2, hint="Key j is in which block of the table, and in which row? And where do the request's keys end?")
def test_decode(student: ModuleType, random: Random) -> Any:
    """One token, one head: keys come through the block table, and nothing behind the end is used"""
    seq_len = random.choice((17, 18, 19))
    return [attended(student, random, 1, seq_len, 1, 1, splits=1, tile=tile) for tile in (3, 8)]


@case(points=2, hint="Token i of the chunk stands at which position? Does a token see itself?")
def test_chunk(student: ModuleType, random: Random) -> Any:
    """A chunk: each token sees what comes before it, and itself"""
    tokens = random.randint(3, 7)
    chunks = (tokens, tokens), (tokens, tokens + random.randint(5, 12))
    return [attended(student, random, new, total, 1, 1, splits=1, tile=4) for new, total in chunks]


@case(points=2, hint="8 query heads, 2 KV heads: which of the 8 belong to KV head 0?")
def test_grouped_heads(student: ModuleType, random: Random) -> Any:
    """Query heads in groups, each with its own KV head"""
    shapes = (8, 2), (3, 3), (random.choice((4, 6)), 1)
    return [attended(student, random, 2, 11, heads, kv_heads, splits=1, tile=5) for heads, kv_heads in shapes]


@case(points=2, hint="Are the parts disjoint? Is every key in one? A part without keys has to be merged too.")
def test_splits(student: ModuleType, random: Random) -> Any:
    """Contexts cut in parts, some of them empty, and chunks whose first tokens see only some parts"""
    seq_len = random.randint(9, 20)
    tokens = random.randint(1, 6)
    return {
        f"{splits} splits": attended(student, random, tokens, seq_len, 4, 2, splits, tile=3) for splits in (2, 3, 7, 16)
    }


def backend_of(student: ModuleType, splits: int, tile: int) -> type:
    """The engine's CPU backend, with the student's attention in place of torch's."""

    class Backend(CPUAttention):
        def plan(self, metadata: Any, positions: Tensor, block_size: int) -> None:
            super().plan(metadata, positions, block_size)
            self.metadata = metadata

        def __call__(
            self, query: Tensor, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None
        ) -> Tensor:
            k_cache[self._slots], v_cache[self._slots] = key, value
            starts, out = self.metadata.query_start_loc.tolist(), torch.empty_like(query)
            for r, seq_len in enumerate(self.metadata.seq_lens_list):
                mine, table = slice(starts[r], starts[r + 1]), self.metadata.block_table[r]
                scale = query.shape[-1] ** -0.5
                out[mine] = student.attend(query[mine], k_cache, v_cache, table, seq_len, scale, splits, tile)
            return out

    return Backend


@case(points=4, hint="All the cases above are small pieces of this one: find the first of them that fails.", seconds=90)
def test_real_engine(student: ModuleType, random: Random) -> Any:
    """Your attention serves real tokens: chunks, decodes, a shared prefix"""
    shared = [random.randrange(10, 290) for _ in range(20)]
    prompts = [shared + [random.randrange(10, 290) for _ in range(random.randint(1, 12))] for _ in range(3)]
    with patch("nanopd.worker.attention.CPUAttention", backend_of(student, random.randint(2, 4), tile=16)):
        return generate(prompts, max_tokens=6, attention_backend="cpu", max_num_batched_tokens=24)
