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
from concurrent.futures import ThreadPoolExecutor
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


GROUP_TOKENS = 2048
"""Tokens of context that the CPU backend copies at once: 3 MB of K and V in the default model, so they stay in cache."""


FEW_TOKENS, LONG_CONTEXT = 8, 1024
"""A request with at most so many new tokens counts as a decode; decodes that see so many tokens or more, all together, go
through the compiled loop, if there is one."""


class CPUAttention:
    """The plain backend: copy K and V out of their blocks, and call torch's attention on the copy.

    It goes through the requests a few at a time, those with as many new tokens and of similar length together, so few
    that the copy is still in the processor's cache when attention reads it: each byte comes from memory once. The
    shorter ones of a group are padded with zeros that a mask hides.

    For a chunk of a prompt the copy is little beside the products; for decodes it is most of the work. So with `compiled`
    those that have much to read go through their blocks without it, in a loop that Numba compiles.
    """

    def __init__(self, compiled: bool = False) -> None:
        self._threads = ThreadPoolExecutor(torch.get_num_threads()) if compiled else None
        self.loaded = False  # Numba, by somebody who needed it

    def load(self, kv_cache: KVCache, num_heads: int) -> None:
        """Loads the loop now, and compiles it unless that was done by an earlier process; not for a cache so small that it
        can be of no use."""
        k_cache, v_cache = kv_cache.layers[0]
        if self._threads and k_cache.shape[0] * k_cache.shape[1] >= LONG_CONTEXT:
            query, zero = k_cache.new_zeros(1, num_heads, k_cache.shape[-1]), torch.zeros(1, dtype=torch.int64)
            one_token = _Decodes(zero.view(1, 1).int(), zero, zero, zero + 1, self._threads)
            one_token.attend(query, k_cache, v_cache, None, torch.empty_like(query), None)
            self.loaded = True

    def plan(self, metadata: AttentionMetadata, positions: Tensor, block_size: int) -> None:
        """Groups the requests of this step."""
        query_lens = metadata.query_start_loc.diff().long()
        request = torch.repeat_interleave(query_lens)  # [T]: whose token is it
        blocks, rest = metadata.block_table[request, positions // block_size].long(), positions % block_size
        metadata.slot_mapping[:] = blocks * block_size + rest
        self._slots = blocks, rest
        own, prefix = split_common_prefix(metadata, block_size)
        self._prefix = prefix and _Group(prefix, block_size, [0], causal=False)
        self._groups: list[_Group | _Decodes] = []
        tokens = (query_lens[request] <= FEW_TOKENS).nonzero().squeeze(1)
        seen = positions[tokens] + 1 - metadata.num_common_prefix_blocks * block_size
        compiled = self._threads if seen.sum() >= LONG_CONTEXT else None
        if compiled:
            self.loaded = True
            self._groups.append(_Decodes(own.block_table, tokens, request[tokens], seen, compiled))
        groups: list[list[int]] = []  # indices of requests
        query_len = 0
        lengths = own.query_lens_list, own.seq_lens_list
        for length, seq_len, i in sorted(zip(*lengths, range(len(lengths[0])))):
            if compiled and length <= FEW_TOKENS:
                continue
            if length != query_len or (len(groups[-1]) + 1) * seq_len > GROUP_TOKENS:
                groups.append([])
                query_len = length
            groups[-1].append(i)
        self._groups += [_Group(own, block_size, rows) for rows in groups]

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None
    ) -> Tensor:
        k_cache[self._slots], v_cache[self._slots] = key, value
        output = torch.empty_like(query)
        lse = query.new_empty(query.shape[:2], dtype=torch.float32) if self._prefix else None
        for group in self._groups:
            group.attend(query, k_cache, v_cache, window, output, lse)
        if self._prefix and lse is not None:
            shared, shared_lse = torch.empty_like(output), torch.empty_like(lse)
            self._prefix.attend(query, k_cache, v_cache, window, shared, shared_lse)
            # The merge of two parts: weights e^a / (e^a + e^b) and e^b / (e^a + e^b).
            output.lerp_(shared, torch.sigmoid(shared_lse - lse).unsqueeze(2).to(output.dtype))
        return output


class _Group:
    """Requests `rows` of a batch, of equal query length, padded to the longest of them."""

    def __init__(self, metadata: AttentionMetadata, block_size: int, rows: list[int], causal: bool = True) -> None:
        self._seq_lens, query_len = metadata.seq_lens[rows].long().unsqueeze(1), metadata.query_lens_list[rows[0]]
        self._tokens = metadata.query_start_loc[rows].long().unsqueeze(1) + torch.arange(query_len)  # [n, query_len]
        self._longest = int(self._seq_lens.max())
        self._table = metadata.block_table[rows, : -(-self._longest // block_size)].long()
        padding = torch.arange(self._table.shape[1] * block_size) >= self._seq_lens
        self._padding = padding.flatten().nonzero().squeeze(1)  # where in the copy nothing of the request stands
        self._positions = self._seq_lens - query_len + torch.arange(query_len)  # [n, query_len]
        self._fresh = causal and query_len > 1 and bool((self._positions[:, 0] == 0).all())  # from its first token on
        self._masks: dict[int | None, Tensor | None] = {} if causal else {None: None}

    def attend(
        self, query: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None, output: Tensor, lse: Tensor | None
    ) -> None:
        """Writes the rows of `output` [T, Hq, D], and of `lse` [T, Hq] if it is wanted, that belong to these requests."""
        q, k, v = query[self._tokens], self._collect(k_cache), self._collect(v_cache)
        # A decode's query heads that share K and V become the rows of one small matrix product.
        decode = q.shape[1] == 1
        q = q.view(len(q), k.shape[1], -1, q.shape[-1]) if decode else q.transpose(1, 2)
        mask = self._mask(window)
        causal = mask is None and self._fresh
        if lse is None:
            out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=not decode)
        else:  # what the line above calls; it also says how large the softmax's sum was
            bias = None if mask is None else torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
            attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            out, sums = attention(q, k, v, is_causal=causal, attn_mask=bias)
            lse[self._tokens] = sums.reshape(len(q), 1, -1) if decode else sums.transpose(1, 2)
        output[self._tokens] = out.reshape(len(q), 1, *query.shape[1:]) if decode else out.transpose(1, 2)

    def _collect(self, cache: Tensor) -> Tensor:
        """K or V of these requests, in order of position: [n, Hkv, longest, D]."""
        copy = cache.index_select(0, self._table.flatten())
        if len(self._tokens) > 1:  # a mask does not hide a NaN in the padding: -inf + NaN and 0 * NaN are NaN
            copy.flatten(0, 1).index_fill_(0, self._padding, 0)
        return copy.view(len(self._tokens), -1, *cache.shape[2:])[:, : self._longest].transpose(1, 2)

    def _mask(self, window: int | None) -> Tensor | None:
        """Which positions each new token sees, bool [n, 1, query_len, longest]: itself and those before it. None where
        that needs no mask: a decode that sees all there is, and prompts from their first token on."""
        if window not in self._masks:
            position, other = self._positions[:, None, :, None], torch.arange(self._longest)
            mask = (other <= position) & (other > position - (window or self._longest + 1))
            all_causal = self._fresh and (window or self._longest) >= self._longest
            self._masks[window] = None if all_causal or mask.all() else mask
        return self._masks[window]


class _Decodes:
    """Tokens of requests with few new ones: each goes through its request's blocks by itself, and sees the first `seen`."""

    def __init__(
        self, block_table: Tensor, tokens: Tensor, request: Tensor, seen: Tensor, threads: ThreadPoolExecutor
    ) -> None:
        from nanopd.kernels.cpu_paged_attention import paged_decode  # Numba takes half a second to import

        by_length, n = seen.argsort(), torch.get_num_threads()
        order = torch.cat([by_length[i::n] for i in range(n)])  # each thread gets some of all lengths
        self._tokens, self._seen = tokens[order], seen[order]
        self._table = block_table[request[order]]
        self._threads, self._paged_decode = threads, paged_decode

    def attend(
        self, query: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None, output: Tensor, lse: Tensor | None
    ) -> None:
        """As _Group's."""
        caches = k_cache, v_cache, self._table, self._seen
        out, sums = self._paged_decode(query[self._tokens], *caches, window, self._threads)
        output[self._tokens] = out.to(output.dtype)
        if lse is not None:
            lse[self._tokens] = sums


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
