"""The solution of exercise 02."""

from collections.abc import Sequence

import torch
from torch import Tensor


def slot_mapping(positions: Tensor, query_start_loc: Tensor, block_table: Tensor, block_size: int, out: Tensor) -> None:
    """Writes each token's slot to `out`, and -1 into what is left of `out` behind the last token.

    The batch is flat: request r has the tokens from query_start_loc[r] up to, not including, query_start_loc[r + 1].

    Args:
        positions: int64 [T], each token's position in its own request.
        query_start_loc: int32 [R + 1].
        block_table: int32 [R, longest]; row r is request r's.
        out: int64, at least T long.
    """
    num_tokens = int(query_start_loc[-1])
    position = positions[:num_tokens]
    request = torch.repeat_interleave(query_start_loc.diff().long())  # [T]: whose token is it
    blocks = block_table[request, position // block_size].long()
    out.fill_(-1)
    out[:num_tokens] = blocks * block_size + position % block_size


def store_kv(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Writes token t's key and value into its slot of the caches. Slot -1: nothing is written.

    Args:
        key, value: [T, Hkv, D].
        slots: int64, at least T long.
    """
    slots = slots[: len(key)]
    real = slots >= 0
    blocks, rest = slots[real] // k_cache.shape[1], slots[real] % k_cache.shape[1]
    k_cache[blocks, rest] = key[real]
    v_cache[blocks, rest] = value[real]


def gather(cache: Tensor, block_table: Tensor, seq_len: int) -> Tensor:
    """The keys or values of one request's first `seq_len` tokens, in order of position: [seq_len, Hkv, D].

    Args:
        block_table: int32, one request's row. It may be longer than the request needs; the rest means nothing.
    """
    num_blocks = -(-seq_len // cache.shape[1])
    return cache[block_table[:num_blocks].long()].flatten(0, 1)[:seq_len]


def pieces(layers: Sequence[tuple[Tensor, Tensor]], block_ids: Sequence[int]) -> list[tuple[int, int]]:
    """The runs of memory that some blocks are: (first byte, number of bytes), by rising address.

    Two runs that touch are one. The first byte is counted from the start of the memory that all views are of.
    Inside one block, the keys of one layer are one run; so are its values.

    Args:
        layers: (keys, values) of each layer.
        block_ids: in any order.
    """
    found = []
    for layer in layers:
        for half in layer:
            for i in block_ids:
                found.append((half[i].storage_offset() * half.itemsize, half[i].nbytes))
    runs: list[tuple[int, int]] = []
    for start, size in sorted(found):
        if runs and runs[-1][0] + runs[-1][1] == start:
            runs[-1] = (runs[-1][0], runs[-1][1] + size)
        else:
            runs.append((start, size))
    return runs
