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
    """The plain backend: for each request, collect its K and V by the block table and call torch's attention.

    Right first: it copies the whole context of every request in every layer.
    """

    def compute_slot_mapping(
        self, positions: Tensor, query_start_loc: Tensor, block_table: Tensor, block_size: int, out: Tensor
    ) -> None:
        request = torch.repeat_interleave(query_start_loc.diff().long())  # [T]: whose token is it
        out[:] = block_table[request, positions // block_size].long() * block_size + positions % block_size

    def plan(self, metadata: AttentionMetadata) -> None:
        self._slot_mapping = metadata.slot_mapping
        self._requests: list[_Span] = []
        start = 0
        for i, (query_len, seq_len) in enumerate(zip(metadata.query_lens_list, metadata.seq_lens_list)):
            self._requests.append(_Span(slice(start, start + query_len), metadata.block_table[i].long(), seq_len))
            start += query_len

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None
    ) -> Tensor:
        block_size = k_cache.shape[1]
        slots = (self._slot_mapping // block_size, self._slot_mapping % block_size)
        k_cache[slots], v_cache[slots] = key, value
        output = torch.empty_like(query)
        for request in self._requests:
            blocks = request.block_table[: -(-request.seq_len // block_size)]
            k = k_cache[blocks].flatten(0, 1)[: request.seq_len]  # [seq_len, Hkv, D]
            v = v_cache[blocks].flatten(0, 1)[: request.seq_len]
            q = query[request.tokens]  # [query_len, Hq, D]
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, tokens, D]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=request.mask(window), enable_gqa=True)
            output[request.tokens] = out[0].transpose(0, 1)
        return output


@dataclass(slots=True)
class _Span:
    """One request in the batch: where its new tokens stand, its blocks, and how long it will be."""

    tokens: slice
    block_table: Tensor
    seq_len: int
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor | None:
        """Which of seq_len positions each new token sees, bool [query_len, seq_len]; None: all of them."""
        if window not in self.masks:
            query_len = self.tokens.stop - self.tokens.start
            if query_len == 1 and (window is None or window >= self.seq_len):
                self.masks[window] = None
            else:
                position = torch.arange(self.seq_len - query_len, self.seq_len).unsqueeze(1)
                other = torch.arange(self.seq_len)
                mask = other <= position
                self.masks[window] = mask if window is None else mask & (other > position - window)
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
