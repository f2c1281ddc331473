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
from dataclasses import dataclass, field
from typing import Protocol

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
    """Stores and attends. The first two are called once a step, the last once a layer."""

    def compute_slot_mapping(
        self, positions: Tensor, query_start_loc: Tensor, block_table: Tensor, block_size: int, out: Tensor
    ) -> None:
        """K1 for each token: positions int64 [T] -> out int64 [T], -1 where the batch is padded."""
        ...

    def plan(self, metadata: AttentionMetadata) -> None: ...

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

    def compute_slot_mapping(
        self, positions: Tensor, query_start_loc: Tensor, block_table: Tensor, block_size: int, out: Tensor
    ) -> None:
        request = torch.repeat_interleave(query_start_loc.diff().long())  # [T]: whose token is it
        out[:] = block_table[request, positions // block_size].long() * block_size + positions % block_size

    def plan(self, metadata: AttentionMetadata) -> None:
        """Groups the requests of this step: decodes whose lengths are within a factor of 2, and each chunk by itself."""
        self._slot_mapping, self._groups = metadata.slot_mapping, list[_Group]()
        groups: dict[tuple[int, int], list[int]] = {}
        for i, (query_len, seq_len) in enumerate(zip(metadata.query_lens_list, metadata.seq_lens_list)):
            groups.setdefault((query_len, seq_len.bit_length() if query_len == 1 else i), []).append(i)
        for (query_len, _), rows in groups.items():
            tokens = metadata.query_start_loc[rows].long().unsqueeze(1) + torch.arange(query_len)
            self._groups.append(_Group(tokens, metadata.block_table[rows].long(), metadata.seq_lens[rows].long()))

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None
    ) -> Tensor:
        block_size = k_cache.shape[1]
        slots = (self._slot_mapping // block_size, self._slot_mapping % block_size)
        k_cache[slots], v_cache[slots] = key, value
        output = torch.empty_like(query)
        for group in self._groups:
            longest = int(group.seq_lens.max())
            blocks = group.block_table[:, : -(-longest // block_size)]
            k, v = (cache[blocks].flatten(1, 2)[:, :longest] for cache in (k_cache, v_cache))  # [n, longest, Hkv, D]
            if len(group.seq_lens) > 1:  # a mask does not hide a NaN in the padding: -inf + NaN and 0 * NaN are NaN
                k, v = (x.masked_fill(group.padding(longest), 0) for x in (k, v))
            q, k, v = (x.transpose(1, 2) for x in (query[group.tokens], k, v))  # [n, heads, tokens, D]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=group.mask(longest, window), enable_gqa=True)
            output[group.tokens] = out.transpose(1, 2)
        return output


@dataclass(slots=True)
class _Group:
    """Requests of equal query length: their tokens in the batch [n, query_len], block tables, and lengths [n]."""

    tokens: Tensor
    block_table: Tensor
    seq_lens: Tensor
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def padding(self, longest: int) -> Tensor:
        """Positions beyond a request's end, bool [n, longest, 1, 1]."""
        return (torch.arange(longest) >= self.seq_lens.unsqueeze(1)).view(len(self.seq_lens), longest, 1, 1)

    def mask(self, longest: int, window: int | None) -> Tensor:
        """Which positions each new token sees, bool [n, 1, query_len, longest]: itself and those before it."""
        if window not in self.masks:
            query_len, other = self.tokens.shape[1], torch.arange(longest)
            position = (self.seq_lens.view(-1, 1) - query_len + torch.arange(query_len)).unsqueeze(2)
            mask = (other <= position) & (other > position - (window or longest + 1))
            self.masks[window] = mask.unsqueeze(1)
        return self.masks[window]


class TritonAttention:
    """The kernels of `nanopd/kernels`: compiled on a GPU, interpreted on a CPU."""

    def __init__(self) -> None:
        from nanopd.kernels import kv_store, paged_attention, slot_mapping

        self.compute_slot_mapping = slot_mapping.slot_mapping
        self._store_kv, self._paged_attention = kv_store.store_kv, paged_attention.paged_attention

    def plan(self, metadata: AttentionMetadata) -> None:
        self._metadata = metadata

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None
    ) -> Tensor:
        m = self._metadata
        self._store_kv(key, value, k_cache, v_cache, m.slot_mapping)
        return self._paged_attention(
            query,
            k_cache,
            v_cache,
            m.block_table,
            m.query_start_loc,
            m.seq_lens,
            scale=query.shape[-1] ** -0.5,
            max_query_len=max(m.query_lens_list),
            max_seq_len=m.max_seq_len,
            sliding_window=window,
        )


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
