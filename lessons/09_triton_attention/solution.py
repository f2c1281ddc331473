"""The solution of exercise 09."""

import torch
from torch import Tensor

State = tuple[Tensor, Tensor, Tensor]


def nothing_seen(rows: int, dim: int) -> State:
    """The state before the first tile."""
    return torch.full((rows,), float("-inf")), torch.zeros(rows), torch.zeros(rows, dim)


def update(state: State, scores: Tensor, values: Tensor) -> State:
    """The state after one more tile."""
    row_max, row_sum, acc = state
    new_max = torch.maximum(row_max, scores.max(dim=1).values)
    pivot = new_max.masked_fill(new_max.isneginf(), 0.0)
    shrink = (row_max - pivot).exp()
    weight = (scores - pivot[:, None]).exp()
    row_sum = row_sum * shrink + weight.sum(dim=1)
    acc = acc * shrink[:, None] + weight @ values
    return new_max, row_sum, acc


def finish(state: State) -> tuple[Tensor, Tensor]:
    """(out [rows, D], lse [rows]): the attention over what was seen, and the logarithm of the sum of exp(score)."""
    row_max, row_sum, acc = state
    total = row_sum.masked_fill(row_sum == 0, 1.0)
    return acc / total[:, None], row_max + total.log()


def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Joins S results over disjoint sets of keys: outs [S, rows, D] and lses [S, rows] as `finish` gives them."""
    top = lses.max(dim=0).values
    weight = (lses - top.masked_fill(top.isneginf(), 0.0)).exp()
    total = weight.sum(dim=0).clamp(min=1.0)  # the largest weighs 1
    return (outs * weight[:, :, None]).sum(dim=0) / total[:, None], top + total.log()


def attend(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_len: int, scale: float, num_splits: int,
    tile: int,
) -> Tensor:  # fmt: skip
    """Attention of one request's new tokens over all its tokens, from the paged cache. Returns [T, Hq, D] like `query`."""
    (num_tokens, num_heads, dim), (block_size, num_kv_heads) = query.shape, k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    position = torch.arange(seq_len - num_tokens, seq_len).repeat_interleave(group)[:, None]
    per_split = -(-seq_len // num_splits)
    out = torch.empty_like(query)
    for head in range(num_kv_heads):
        heads = slice(head * group, (head + 1) * group)
        rows = query[:, heads].reshape(-1, dim).float()
        parts = []
        for split in range(num_splits):
            state, stop = nothing_seen(len(rows), dim), min((split + 1) * per_split, seq_len)
            for first in range(split * per_split, stop, tile):
                j = torch.arange(first, min(first + tile, stop))
                where = block_table[j // block_size].long(), j % block_size, head
                scores = rows @ k_cache[where].float().T * scale
                scores = scores.masked_fill(j > position, float("-inf"))
                state = update(state, scores, v_cache[where].float())
            parts.append(finish(state))
        merged, _ = merge(torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts]))
        out[:, heads] = merged.view(num_tokens, group, dim).to(out.dtype)
    return out
