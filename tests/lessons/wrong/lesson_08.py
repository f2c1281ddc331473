"""Wrong slot and store kernels."""

WRONG = {
    "takes no care of slot -1": [("    if slot >= 0:\n", "    if True:\n")],
    "thinks that slot 0 is padding": [("    if slot >= 0:\n", "    if slot > 0:\n")],
    "works slots out in 32 bits": [("block.to(tl.int64) * BLOCK_SIZE", "block * BLOCK_SIZE")],
    "stores a whole tile of slots": [("tl.store(out + token, slot, mask=mine)", "tl.store(out + token, slot)")],
    "maps one tile only": [
        ("    for first in range(start, end, TILE):\n", "    for first in range(start, start + 1, TILE):\n")
    ],
    "forgets the heads in the mask": [("exists = (head < NUM_HEADS) & (dim < D)", "exists = (head >= 0) & (dim < D)")],
    "forgets the dims in the mask": [
        ("exists = (head < NUM_HEADS) & (dim < D)", "exists = (head < NUM_HEADS) & (dim >= 0)")
    ],
    "goes by shapes instead of strides": [
        (
            "(slot // BLOCK_SIZE) * stride_block + (slot % BLOCK_SIZE) * stride_slot + head * stride_head + dim",
            "slot * stride_slot + head * D + dim",
        )
    ],
    "believes that heads are neighbours": [("stride_slot + head * stride_head + dim", "stride_slot + head * D + dim")],
    "reads values with the keys' strides": [
        ("value + token * v_token + head * v_head", "value + token * k_token + head * k_head")
    ],
}
