"""Exercise 09: paged attention with an online softmax, in plain torch.

Write the four functions. The engine will compute its attention with yours: `nanopd grade 09 exercise.py`.

A *row* is one query vector: one head of one token. Its state, while the keys come tile by tile: (row_max, row_sum, acc),
that is [rows], [rows] and [rows, D] in float32: the largest score so far (-inf: none seen), the sum of exp(score - row_max),
and the same sum with each term times its value. No part of this may become NaN or inf, however large the scores are.
"""

import torch
from torch import Tensor

State = tuple[Tensor, Tensor, Tensor]


def nothing_seen(rows: int, dim: int) -> State:
    """The state before the first tile."""
    return torch.full((rows,), float("-inf")), torch.zeros(rows), torch.zeros(rows, dim)


def update(state: State, scores: Tensor, values: Tensor) -> State:
    """The state after one more tile.

    scores: [rows, keys], -inf where a row may not see a key; it may be so for a whole row, in the first tile too.
    values: [keys, D].
    """
    raise NotImplementedError("update")


def finish(state: State) -> tuple[Tensor, Tensor]:
    """(out [rows, D], lse [rows]): the attention over what was seen, and the logarithm of the sum of exp(score).

    A row that has seen nothing: zeros and -inf.
    """
    raise NotImplementedError("finish")


def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Joins S results over disjoint sets of keys: outs [S, rows, D] and lses [S, rows] as `finish` gives them.

    Returns (out [rows, D], lse [rows]) over all the keys. A part that saw nothing counts nothing, and all may be such.
    """
    raise NotImplementedError("merge")


def attend(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_len: int, scale: float, num_splits: int,
    tile: int,
) -> Tensor:  # fmt: skip
    """Attention of one request's new tokens over all its tokens, from the paged cache. Returns [T, Hq, D] like `query`.

    query: [T, Hq, D], the last T of the request's seq_len tokens. Each sees every token up to itself. Query head h uses KV
    head h // (Hq // Hkv).
    k_cache, v_cache: [num_blocks, block_size, Hkv, D]. block_table: int32 [max_blocks]. Slots beyond seq_len may hold NaN,
    entries of the table beyond the used ones anything: neither may be used.
    A score is the dot product times `scale`.

    The seq_len keys are cut into num_splits parts of ceil(seq_len / num_splits) keys (the last ones may be shorter, or
    empty). Each part starts from nothing_seen and goes through `update` with at most `tile` keys at a time; then `merge`
    joins the num_splits parts, the empty ones too.
    """
    raise NotImplementedError("attend")
