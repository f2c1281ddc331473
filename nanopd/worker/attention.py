"""Attention over the paged KV cache: what a step needs to know for it, and the backends that compute it.

A batch is flat: the tokens of all requests one after the other, with no padding between them.

    tokens           | a a a a a | b | c c |          a: a prefill chunk, b: a decode, c: another chunk
    query_start_loc  0           5   6     8
    seq_lens             37        90   2             tokens each request will have in the cache after this step

A backend first stores the new K and V in their slots and then lets each token see every earlier position of its own
request. The model calls `ForwardContext.attend` once a layer and knows nothing of all this.

Cascade: where all requests begin with the same blocks, every token attends to these as if they were one request's, and then
to what is its own request's. The two outputs are weighed by the sums of their softmaxes. Rules K1, T4; lessons 07 and 09.
"""

import os
import sys
from dataclasses import dataclass, replace
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
    num_common_prefix_blocks: int = 0  # cascade: so many blocks at the start of all tables are the same, and computed


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


LONG_CONTEXT = 1024
"""The compiled loop is loaded by the first step whose tokens see so many tokens or more, all together."""


class CPUAttention:
    """For each request, copies K and V out of their blocks and calls torch's attention on the copy.

    The copy costs more than the attention of a decode, and torch's is slow on short prompts. So with `compiled` a loop that
    Numba compiles goes through the blocks without it, as soon as there is so much to do that loading it pays.
    """

    def __init__(self, compiled: bool = False) -> None:
        self._compiled, self.loaded = compiled, False

    def load(self, kv_cache: KVCache, num_heads: int) -> None:
        """Loads the loop now, and compiles it unless that was done by an earlier process."""
        if self._compiled:
            k_cache, v_cache = kv_cache.layers[0]
            query, zero = k_cache.new_zeros(1, num_heads, k_cache.shape[-1]), torch.zeros(1, 1, dtype=torch.int32)
            one_token = AttentionMetadata(zero[0], zero[0], zero, zero[0], [1], [1])
            _Tiles(one_token, causal=True).attend(
                query, k_cache, v_cache, None, torch.empty_like(query), query[..., 0].float()
            )
            self.loaded = True

    def plan(self, metadata: AttentionMetadata, positions: Tensor, block_size: int) -> None:
        """Finds the slots, and decides how this step attends."""
        request = torch.repeat_interleave(metadata.query_start_loc.diff().long())  # [T]: whose token is it
        blocks, rest = metadata.block_table[request, positions // block_size].long(), positions % block_size
        metadata.slot_mapping[:] = blocks * block_size + rest
        self._slots = blocks, rest
        self.loaded |= self._compiled and int(positions.sum()) >= LONG_CONTEXT
        kind = _Tiles if self.loaded else _Copies
        own, prefix = split_common_prefix(metadata, block_size)
        self._own, self._prefix = kind(own, causal=True), prefix and kind(prefix, causal=False)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None
    ) -> Tensor:
        k_cache[self._slots], v_cache[self._slots] = key, value
        output = torch.empty_like(query)
        lse = query.new_empty(query.shape[:2], dtype=torch.float32) if self._prefix else None
        self._own.attend(query, k_cache, v_cache, window, output, lse)
        if self._prefix and lse is not None:
            shared, shared_lse = torch.empty_like(output), torch.empty_like(lse)
            self._prefix.attend(query, k_cache, v_cache, window, shared, shared_lse)
            # The merge of two parts: weights e^a / (e^a + e^b) and e^b / (e^a + e^b).
            output.lerp_(shared, torch.sigmoid(shared_lse - lse).unsqueeze(2).to(output.dtype))
        return output


class _Copies:
    """Request by request: a copy of its K and V, and torch's attention on it. Plain, and what the loop is compared with."""

    def __init__(self, metadata: AttentionMetadata, causal: bool) -> None:
        self._metadata, self._causal = metadata, causal

    def attend(
        self, query: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None, output: Tensor, lse: Tensor | None
    ) -> None:
        """Fills output [T, Hq, D], and if it is wanted the log of each softmax's sum, lse [T, Hq] float32."""
        start, m = 0, self._metadata
        for query_len, seq_len, table in zip(m.query_lens_list, m.seq_lens_list, m.block_table):
            blocks, mine = table[: -(-seq_len // k_cache.shape[1])].long(), slice(start, start + query_len)
            # [1, heads, tokens, D]
            k, v = (c[blocks].flatten(0, 1)[:seq_len].transpose(0, 1).unsqueeze(0) for c in (k_cache, v_cache))
            q, mask = query[mine].transpose(0, 1).unsqueeze(0), None
            if self._causal and (query_len > 1 or window):  # a decode without a window sees all there is
                position, other = torch.arange(seq_len - query_len, seq_len).unsqueeze(1), torch.arange(seq_len)
                hidden = (other > position) | (other <= position - (window or seq_len))
                mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, -torch.inf)
            if lse is None:
                out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
            else:  # what the line above calls; it also says how large the softmax's sum was
                out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask)
                lse[mine] = sums[0].T
            output[mine] = out[0].transpose(0, 1)
            start += query_len


class _Tiles:
    """All requests at once, through the compiled loop."""

    def __init__(self, metadata: AttentionMetadata, causal: bool) -> None:
        from nanopd.kernels import cpu_paged_attention as kernel  # Numba takes half a second to import

        self._tiles = kernel.plan_tiles(metadata.query_lens_list, metadata.seq_lens_list, causal)
        self._table, self._paged_attention = metadata.block_table, kernel.paged_attention

    def attend(
        self, query: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None, output: Tensor, lse: Tensor | None
    ) -> None:
        """As _Copies'."""
        self._paged_attention(query, k_cache, v_cache, self._table, self._tiles, window, output, lse)


def split_common_prefix(
    metadata: AttentionMetadata, block_size: int
) -> tuple[AttentionMetadata, AttentionMetadata | None]:
    """The batch without the blocks that all requests share, and a batch of one request that has only these, and whose new
    tokens are all the tokens there are; each of them sees all of it."""
    m, n = metadata, metadata.num_common_prefix_blocks
    if n == 0:
        return m, None
    size, num_tokens = n * block_size, sum(m.query_lens_list)
    lengths = [seq_len - size for seq_len in m.seq_lens_list]
    starts, seq_lens = m.query_start_loc[[0, -1]], torch.full_like(m.seq_lens[:1], size)
    prefix = replace(m, query_start_loc=starts, seq_lens=seq_lens, block_table=m.block_table[:1, :n], max_seq_len=size)
    prefix.query_lens_list, prefix.seq_lens_list = [num_tokens], [size]
    own = replace(m, seq_lens=m.seq_lens - size, block_table=m.block_table[:, n:], seq_lens_list=lengths)
    own.max_seq_len = max(lengths)
    return own, prefix


class TritonAttention:
    """The kernels of `nanopd/kernels`: compiled on a GPU, interpreted on a CPU."""

    def __init__(self) -> None:
        from nanopd.kernels import kv_store, paged_attention, slot_mapping

        self._slot_mapping, self._store_kv = slot_mapping.slot_mapping, kv_store.store_kv
        self._paged_attention, self._merge = paged_attention.paged_attention, paged_attention.merge_partials

    def plan(self, metadata: AttentionMetadata, positions: Tensor, block_size: int) -> None:
        self._metadata = m = metadata
        self._slot_mapping(positions, m.query_start_loc, m.block_table, block_size, m.slot_mapping)
        self._own, self._prefix = split_common_prefix(metadata, block_size)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None
    ) -> Tensor:
        self._store_kv(key, value, k_cache, v_cache, self._metadata.slot_mapping)

        def attend(m: AttentionMetadata, **options: Any) -> Tensor:
            options |= {"max_query_len": max(m.query_lens_list), "max_seq_len": m.max_seq_len}
            tables = m.block_table, m.query_start_loc, m.seq_lens
            return self._paged_attention(query, k_cache, v_cache, *tables, query.shape[-1] ** -0.5, **options)

        if self._prefix is None:
            return attend(self._own, sliding_window=window)
        lse = query.new_empty(2, *query.shape[:2], dtype=torch.float32)
        parts = attend(self._own, lse=lse[0]), attend(self._prefix, lse=lse[1], causal=False)
        merged = torch.stack(parts, 2).float(), lse.permute(1, 2, 0).contiguous()
        return self._merge(*merged, torch.empty_like(query))


def choose_backend(name: str, device: str, dtype: torch.dtype) -> AttentionBackend:
    """T4: the backend, chosen once at start: Triton on a GPU, the plain one elsewhere, or what was asked for.

    Triton without a GPU means its interpreter (slow: to learn and to test). It decides between the two when it is
    imported, so this raises UserError if somebody imported it before for compiling.
    """
    if name == "cpu" or (name == "auto" and device == "cpu"):
        # Numba does not know float16; and some switch its compiler off, to debug code of their own.
        known = device == "cpu" and dtype != torch.float16
        return CPUAttention(compiled=known and "NUMBA_DISABLE_JIT" not in os.environ)
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
