"""Exercise 02: slots, storing, gathering, and the pieces of memory that a block is.

Write the four functions. An attention backend made of the first three will serve real tokens, in all three layouts:
`nanopd grade 02 exercise.py`. Rule K1; see lessons/rules.md.

In all of them a cache is one layer's keys or values: a view [num_blocks, block_size, Hkv, D] of a larger memory. Its
shape is the same in each layout and its strides are not. The view need not be contiguous.
"""

from collections.abc import Sequence

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
    raise NotImplementedError("slot_mapping")


def store_kv(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Writes token t's key and value into its slot of the caches. Slot -1: nothing is written.

    Args:
        key, value: [T, Hkv, D].
        slots: int64, at least T long.
    """
    raise NotImplementedError("store_kv")


def gather(cache: Tensor, block_table: Tensor, seq_len: int) -> Tensor:
    """The keys or values of one request's first `seq_len` tokens, in order of position: [seq_len, Hkv, D].

    Args:
        block_table: int32, one request's row. It may be longer than the request needs; the rest means nothing.
    """
    raise NotImplementedError("gather")


def pieces(layers: Sequence[tuple[Tensor, Tensor]], block_ids: Sequence[int]) -> list[tuple[int, int]]:
    """The runs of memory that some blocks are: (first byte, number of bytes), by rising address.

    Two runs that touch are one. The first byte is counted from the start of the memory that all views are of.
    Inside one block, the keys of one layer are one run; so are its values.

    Args:
        layers: (keys, values) of each layer.
        block_ids: in any order.
    """
    raise NotImplementedError("pieces")
