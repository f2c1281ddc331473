"""What each kernel computes, in plain PyTorch, to read beside it (T2). These take the arguments of the kernels' host
functions and are held to the same tests: against rule K1 token by token, against attention in float64.

The CPU backend of the engine (`nanopd/worker/attention.py`) does the same, faster and without padding.
"""

import math

import torch
from torch import Tensor

from nanopd.kernels.slot_mapping import PAD_SLOT


def slot_mapping_reference(
    positions: Tensor, query_start_loc: Tensor, block_table: Tensor, block_size: int, out: Tensor
) -> None:
    """Rule K1 as tensor operations."""
    num_tokens = int(query_start_loc[-1])
    position = positions[:num_tokens]
    req = torch.repeat_interleave(query_start_loc.diff().long())  # [T]: which request token t is of
    out.fill_(PAD_SLOT)
    out[:num_tokens] = block_table[req, position // block_size].long() * block_size + position % block_size


def store_kv_reference(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Indexed assignment; slot -1 writes nothing."""
    slot = slot_mapping[: key.shape[0]]
    real = slot >= 0
    index = (slot[real] // k_cache.shape[1], slot[real] % k_cache.shape[1])
    k_cache[index], v_cache[index] = key[real], value[real]


def paged_attention_reference(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, query_start_loc: Tensor, seq_lens: Tensor,
    scale: float, *, sliding_window: int | None = None, causal: bool = True,
) -> Tensor:  # fmt: skip
    """A request at a time: gather its keys, one dense softmax in float32."""
    out, starts, group = torch.zeros_like(query), query_start_loc.tolist(), query.shape[1] // k_cache.shape[2]
    for req, seq_len in enumerate(seq_lens.tolist()):
        chunk = slice(starts[req], starts[req + 1])
        j = torch.arange(seq_len, device=query.device)
        index = (block_table[req, j // k_cache.shape[1]].long(), j % k_cache.shape[1])
        k, v = (cache[index].float().repeat_interleave(group, 1) for cache in (k_cache, v_cache))  # [seq_len, Hq, D]
        scores = torch.einsum("qhd,khd->hqk", query[chunk].float(), k) * scale
        position = torch.arange(seq_len - scores.shape[1], seq_len, device=query.device)[:, None]
        seen = (j <= position if causal else j >= 0) & (j > position - (sliding_window or math.inf))
        out[chunk] = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -math.inf).softmax(-1), v).to(out.dtype)
    return out
