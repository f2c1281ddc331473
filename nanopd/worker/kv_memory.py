"""The bytes of the KV cache: one allocation, seen through one of three layouts.

    kv_first      (layer, 2, block, slot, head, dim)    a layer's keys, then its values: what a kernel likes to read
    blocks_first  (layer, block, 2, slot, head, dim)    keys and values of a block side by side
    cross_layer   (block, layer, 2, slot, head, dim)    a block of all layers in one run: what a transfer likes to send

Whoever reads or writes the cache gets a view (block, slot, head, dim) of one layer's keys or values, and goes by its
strides; so only this file knows which layout is in use. Rule K1; lesson 02.
"""

import contextlib
import math
import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import Tensor

from nanopd.config import EngineConfig, SamplingParams, parse_bytes, require
from nanopd.models.config import ModelConfig
from nanopd.models.decoder import Decoder
from nanopd.worker.sampler import SamplingRow, sample

# For each layout, which dimensions of the allocation are layer, kv and block. Slot, head and dim follow in all of them.
_LAYER_KV_BLOCK = {"kv_first": (0, 1, 2), "blocks_first": (0, 2, 1), "cross_layer": (1, 2, 0)}


@dataclass(frozen=True, slots=True)
class KVCache:
    """All K and V of an engine.

    `memory` is the one allocation, its six dimensions in the order of the layout; `by_layer` is the same in the order
    (layer, kv, block, slot, head, dim). `layers[i]` is (keys, values) of layer i, each a view (num_blocks, block_size,
    num_kv_heads, head_dim) of that memory.
    """

    memory: Tensor
    by_layer: Tensor
    layers: list[tuple[Tensor, Tensor]]

    @classmethod
    def allocate(
        cls, model: ModelConfig, num_blocks: int, block_size: int, layout: str, dtype: torch.dtype, device: str
    ) -> "KVCache":
        """All zeros, so that no garbage can be a NaN. On a CPU the operating system hands out a page when it is first
        written, so a block that was never used costs nothing."""
        order = (*_LAYER_KV_BLOCK[layout], 3, 4, 5)
        sizes = (model.num_layers, 2, num_blocks, block_size, model.num_kv_heads, model.head_dim)
        shape = [sizes[order.index(dim)] for dim in range(6)]
        if device == "cpu":
            pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux: pages of 2 MiB, whose addresses the processor can remember
                pages.madvise(mmap.MADV_HUGEPAGE)
            memory = torch.frombuffer(pages, dtype=dtype).view(shape)
        else:
            memory = torch.zeros(shape, dtype=dtype, device=device)
        by_layer = memory.permute(order)
        return cls(memory, by_layer, [(by_layer[i, 0], by_layer[i, 1]) for i in range(model.num_layers)])


def strides(kv_cache: KVCache) -> dict[str, int]:
    """Bytes from one layer, kv, block, slot or head to the next: all a trace's reader needs to find a slot's bytes."""
    steps = [n * kv_cache.memory.itemsize for n in kv_cache.by_layer.stride()]
    return dict(zip(("layer", "kv", "block", "slot", "head"), steps))


def bytes_per_block(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers: keys and values."""
    return model.num_layers * 2 * block_size * model.num_kv_heads * model.head_dim * dtype.itemsize


def free_memory(device: str) -> int:
    """Bytes that could be allocated now: of the GPU, or of the machine and the container we run in."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError):  # in a container (cgroup v2) its limit counts, not the machine's
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        free = min(free, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    return max(free, 0)


def profile_peak_memory(model: Decoder, num_tokens: int, num_seqs: int, device: str) -> int:
    """Bytes that a step of the largest size needs beside weights and cache. On a CPU 0: there it is not what is scarce."""
    if not device.startswith("cuda"):
        return 0
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    tokens = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    with torch.inference_mode():
        hidden_states = model(tokens, tokens, lambda layer, query, key, value: query.clone())
        logits = model.compute_logits(hidden_states[:num_seqs])
        dear = SamplingParams(top_p=0.5, presence_penalty=1.0, seed=0)
        sample(logits, [SamplingRow(dear, np.zeros(1, np.int64), 1, frozenset())] * len(logits))
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()  # else torch keeps it, and the device reports it as taken already
    return peak


def plan_num_blocks(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: str, reserved: int = 0
) -> int:
    """How many blocks the pool gets: what the user asked for in blocks or bytes, or what fits into a share of the memory
    that is free beyond `reserved` bytes (a quarter on a CPU, whose memory others need too; 90% of a GPU's), but no more
    than `max_num_seqs` requests of the greatest length could fill.

    Raises UserError if that is more than is free, or less than one block."""
    free, block = free_memory(device) - reserved, bytes_per_block(model, config.block_size, dtype)
    if config.num_blocks is not None:
        budget = config.num_blocks * block
    elif config.kv_cache_memory is not None:
        budget = parse_bytes(config.kv_cache_memory)
    else:
        longest = -(-(config.max_model_len or model.max_position_embeddings) // config.block_size)
        share = int(free * (0.9 if device.startswith("cuda") else 0.25))
        budget = min(share, config.max_num_seqs * longest * block)
    wish, least, most = (f"{size / 2**20:,.2f} MiB" for size in (budget, block, free))
    why = f"one block takes {least}, and {most} are free. Change --num-blocks, --kv-cache-memory or --block-size"
    require(block <= budget <= free, f"The KV cache cannot get {wish}: {why}.")
    return budget // block
