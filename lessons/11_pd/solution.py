"""The solution of exercise 11."""

from collections.abc import Sequence
from typing import NamedTuple

from nanopd.connector.protocol import Layout


class Piece(NamedTuple):
    """What is written at once, without a gap: `num_bytes` from address `source` here to address `target` there."""

    source: int
    target: int
    num_bytes: int


def blocks_ready(table: Sequence[int], num_computed: int, num_tokens: int, block_size: int) -> list[int]:
    """P's blocks, from the start of the prompt, that can be sent when `num_computed` of its `num_tokens` are computed.

    A block that still grows is not ready. The last block of a whole prompt is, even if it is not full. `table` may be longer
    than the prompt: P's first output token may have got a block of its own.
    """
    whole = num_computed >= num_tokens
    count = -(-num_tokens // block_size) if whole else num_computed // block_size
    return list(table[:count])


def pair_up(ready: Sequence[int], num_sent: int, first_block: int, theirs: Sequence[int]) -> list[tuple[int, int]]:
    """What is to be written now: pairs (P's block, D's block), in the order of the prompt.

    Args:
        ready: P's blocks that can be sent, from the start of the prompt.
        num_sent: how many blocks, counted from the start of the prompt, need no writing any more.
        first_block: D has the blocks before this one itself.
        theirs: D's blocks for block `first_block` of the prompt and all after it, ready or not.
    """
    start = max(num_sent, first_block)
    return list(zip(ready[start:], theirs[start - first_block :]))


def pieces_of(
    layout: Layout, base: int, ids: Sequence[int], to: Layout, to_base: int, to_ids: Sequence[int]
) -> list[Piece]:
    """The memory of blocks `ids` here and `to_ids` there, pairwise, with all their runs.

    Sorted by `source`, and as few pieces as possible: two that touch on both sides are one. The lists may be in any order.

    Args:
        layout, base: P's layout, and the address where its memory starts.
        to, to_base: D's.
    """
    size = layout.run_bytes
    single = [
        Piece(base + (r * layout.num_blocks + here) * size, to_base + (r * to.num_blocks + there) * size, size)
        for r in range(layout.num_runs)
        for here, there in zip(ids, to_ids)
    ]
    pieces: list[Piece] = []
    for piece in sorted(single):
        last = pieces[-1] if pieces else Piece(0, 0, 0)
        touches = piece.source == last.source + last.num_bytes, piece.target == last.target + last.num_bytes
        if pieces and all(touches):
            pieces[-1] = Piece(last.source, last.target, last.num_bytes + size)
        else:
            pieces.append(piece)
    return pieces
