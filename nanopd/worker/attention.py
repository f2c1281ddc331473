"""Attention over the paged KV cache: what a step needs to know for it, and the backends that compute it.

A batch is flat: the tokens of all requests one after the other, with no padding between them.

    tokens           | a a a a a | b | c c |          a: a prefill chunk, b: a decode, c: another chunk
    query_start_loc  0           5   6     8
    seq_lens             37        90   2             tokens each request will have in the cache after this step

A backend first stores the new K and V in their slots and then lets each token see every earlier position of its own
request. The model calls `ForwardContext.attend` once a layer and knows nothing of all this. Rules K1, T4; lesson 07.
"""

import os
import sys
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from nanopd.config import UserError
from nanopd.worker.kv_memory import KVCache


@dataclass(slots=True)
class AttentionMetadata:
    """One step's batch of R requests and T tokens, the same for all layers.

    The tensors are on the device; the lists hold the same numbers for decisions made on the host, and only for requests
    that exist: a batch padded to the size of a CUDA graph has more rows in its tensors, without tokens.
    """

    query_start_loc: Tensor  # int32 [R + 1]
    seq_lens: Tensor  # int32 [R]
    block_table: Tensor  # int32 [R, longest table]; entries past a request's last block mean nothing
    slot_mapping: Tensor  # int64 [T]; -1: padding, nothing is written
    query_lens_list: list[int]
    seq_lens_list: list[int]
    max_seq_len: int | None = None  # None: any that the table can hold, for a graph that is replayed with others


class AttentionBackend(Protocol):
    """Stores and attends: planned once a step, called once a layer."""

    def plan(self, metadata: AttentionMetadata, positions: Tensor, block_size: int) -> None:
        """Fills `metadata.slot_mapping` (K1) from the positions, int64 [T], and remembers what all layers need."""
        ...

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None
    ) -> Tensor:
        """query [T, Hq, D], key and value [T, Hkv, D], caches [num_blocks, block_size, Hkv, D] -> [T, Hq, D]."""
        ...


@dataclass(slots=True)
class ForwardContext:
    """What the attention layers of one forward pass share. The model sees only `attend`."""

    backend: AttentionBackend
    kv_cache: KVCache
    windows: tuple[int | None, ...]  # each layer's sliding window

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One layer's attention; see AttentionBackend for shapes."""
        k_cache, v_cache = self.kv_cache.layers[layer]
        return self.backend(query, key, value, k_cache, v_cache, self.windows[layer])


class CPUAttention:
    """The plain backend: collect each request's K and V by its block table, and call torch's attention on them.

    Prefill chunks are computed one request at a time. Decodes are computed together, those of similar length in one
    call: the shorter ones are padded with whatever is there, and a mask hides it. All of the context is copied in every
    layer; that is the price of having no kernel of our own.
    """

    def plan(self, metadata: AttentionMetadata, positions: Tensor, block_size: int) -> None:
        """Groups the requests of this step: decodes whose lengths are within a factor of 2, and each chunk by itself."""
        request = torch.repeat_interleave(metadata.query_start_loc.diff().long())  # [T]: whose token is it
        blocks, rest = metadata.block_table[request, positions // block_size].long(), positions % block_size
        metadata.slot_mapping[:] = blocks * block_size + rest
        self._slots, self._groups = (blocks, rest), list[_Group]()
        groups: dict[tuple[int, int], list[int]] = {}
        for i, (query_len, seq_len) in enumerate(zip(metadata.query_lens_list, metadata.seq_lens_list)):
            groups.setdefault((query_len, seq_len.bit_length() if query_len == 1 else i), []).append(i)
        for (query_len, _), rows in groups.items():
            longest = max(metadata.seq_lens_list[i] for i in rows)
            tokens = metadata.query_start_loc[rows].long().unsqueeze(1) + torch.arange(query_len)
            table = metadata.block_table[rows, : -(-longest // block_size)].long()
            self._groups.append(_Group(tokens, table, metadata.seq_lens[rows].long().view(-1, 1), longest))

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None
    ) -> Tensor:
        k_cache[self._slots], v_cache[self._slots] = key, value
        output = torch.empty_like(query)
        for group in self._groups:
            # [n, longest, Hkv, D]
            k, v = (cache[group.block_table].flatten(1, 2)[:, : group.longest] for cache in (k_cache, v_cache))
            if len(group.tokens) > 1:  # a mask does not hide a NaN in the padding: -inf + NaN and 0 * NaN are NaN
                k, v = (x.masked_fill(group.padding, 0) for x in (k, v))
            q, k, v = (x.transpose(1, 2) for x in (query[group.tokens], k, v))  # [n, heads, tokens, D]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask(window), enable_gqa=True)
            output[group.tokens] = out.transpose(1, 2)
        return output


class _Group:
    """Requests of equal query length: their tokens in the batch [n, query_len], block tables, and lengths [n, 1]."""

    def __init__(self, tokens: Tensor, block_table: Tensor, seq_lens: Tensor, longest: int) -> None:
        self.tokens, self.block_table, self.longest = tokens, block_table, longest
        self.padding = (torch.arange(longest) >= seq_lens)[:, :, None, None]  # positions beyond a request's end
        self._positions = seq_lens - tokens.shape[1] + torch.arange(tokens.shape[1])  # [n, query_len]
        self._masks: dict[int | None, Tensor] = {}

    def mask(self, window: int | None) -> Tensor:
        """Which positions each new token sees, bool [n, 1, query_len, longest]: itself and those before it."""
        if window not in self._masks:
            position, other = self._positions[:, None, :, None], torch.arange(self.longest)
            self._masks[window] = (other <= position) & (other > position - (window or self.longest + 1))
        return self._masks[window]


class TritonAttention:
    """The kernels of `nanopd/kernels`: compiled on a GPU, interpreted on a CPU."""

    def __init__(self) -> None:
        from nanopd.kernels import kv_store, paged_attention, slot_mapping

        self._slot_mapping, self._store_kv = slot_mapping.slot_mapping, kv_store.store_kv
        self._paged_attention = paged_attention.paged_attention

    def plan(self, metadata: AttentionMetadata, positions: Tensor, block_size: int) -> None:
        self._metadata = m = metadata
        self._slot_mapping(positions, m.query_start_loc, m.block_table, block_size, m.slot_mapping)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None
    ) -> Tensor:
        m = self._metadata
        self._store_kv(key, value, k_cache, v_cache, m.slot_mapping)
        tables = m.block_table, m.query_start_loc, m.seq_lens, query.shape[-1] ** -0.5
        lengths: dict[str, Any] = {"max_query_len": max(m.query_lens_list), "max_seq_len": m.max_seq_len}
        return self._paged_attention(query, k_cache, v_cache, *tables, sliding_window=window, **lengths)


def choose_backend(name: str, device: str) -> AttentionBackend:
    """T4: the backend, chosen once at start: Triton on a GPU, the plain one elsewhere, or what was asked for.

    Triton without a GPU means its interpreter (slow: to learn and to test). It decides between the two when it is
    imported, so this raises UserError if somebody imported it before for compiling.
    """
    if name == "cpu" or (name == "auto" and device == "cpu"):
        return CPUAttention()
    if device == "cpu":
        if os.environ.get("TRITON_INTERPRET") != "1" and "triton" in sys.modules:
            raise UserError(
                "Triton is loaded already, for compiling; set TRITON_INTERPRET=1 before the program starts."
            )
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        return TritonAttention()
    except ImportError:
        raise UserError("Triton is not installed (it exists for Linux only); use --attention-backend cpu.") from None
