"""Where does a token's key and value go? Rule K1: slot = block_table[position // block_size] * block_size + the rest.

The engine runs this once a step, before the first layer: all layers share the block table, so all share the slots. Slot -1
means "write nothing"; it fills the tail of `out`, where a batch was padded up to the size of a CUDA graph. A padded request
has no tokens here (query_start_loc repeats its last value). Nothing in this file knows what a slot holds.
"""

import triton
import triton.language as tl
from torch import Tensor

PAD_SLOT = -1


# One program = one request.
#
#   program r loads   query_start_loc[r], [r+1]      which tokens are mine
#                     positions[start:end]           8 bytes each, neighbours: coalesced
#                     block_table[r, position//bs]   neighbours read the same entry: one sector serves many
#             stores  out[start:end]                 8 bytes each, coalesced
@triton.jit  # type: ignore[untyped-decorator]
def _slot_mapping_kernel(  # type: ignore[no-untyped-def]
    positions, query_start_loc, block_table, out, stride_table, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr
):
    req = tl.program_id(0)
    end = tl.load(query_start_loc + req + 1)
    for first in range(tl.load(query_start_loc + req), end, TILE):
        token = first + tl.arange(0, TILE)
        position = tl.load(positions + token, mask=token < end, other=0)
        block = tl.load(block_table + req * stride_table + position // BLOCK_SIZE, mask=token < end, other=0)
        tl.store(out + token, block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE, mask=token < end)


def slot_mapping(positions: Tensor, query_start_loc: Tensor, block_table: Tensor, block_size: int, out: Tensor) -> None:
    """Write the slot of every token to `out[:T]`, and -1 behind them (T = query_start_loc[-1], read on the device).

    positions: int64 [>= T], query_start_loc: int32 [R + 1], block_table: int32 [R, max_blocks], out: int64 [>= T].
    """
    out.fill_(PAD_SLOT)
    args = positions, query_start_loc, block_table, out, block_table.stride(0)
    _slot_mapping_kernel[(block_table.shape[0],)](*args, BLOCK_SIZE=block_size, TILE=1024)
