"""Wrong slots, stores, gathers and pieces."""

WRONG = {
    "the position in the batch": [
        ("    position = positions[:num_tokens]\n", "    position = torch.arange(num_tokens)\n")
    ],
    "always the first request's table": [
        ("block_table[request, position // block_size]", "block_table[0, position // block_size]")
    ],
    "forgets the padding": [("    out.fill_(-1)\n", "")],
    "blocks as if they were neighbours": [
        (
            "    blocks = block_table[request, position // block_size].long()\n",
            "    blocks = block_table[request, 0].long() + position // block_size\n",
        )
    ],
    "slot -1 taken as an index": [("    real = slots >= 0\n", "    real = slots >= -1\n")],
    "writes into a copy": [
        (
            "    k_cache[blocks, rest] = key[real]\n    v_cache[blocks, rest] = value[real]\n",
            "    k_cache.reshape(-1, *key.shape[1:])[slots[real]] = key[real]\n"
            "    v_cache.reshape(-1, *key.shape[1:])[slots[real]] = value[real]\n",
        )
    ],
    "values are stored as keys": [
        ("    v_cache[blocks, rest] = value[real]\n", "    v_cache[blocks, rest] = key[real]\n")
    ],
    "gathers whole blocks": [(".flatten(0, 1)[:seq_len]", ".flatten(0, 1)")],
    "gathers sorted blocks": [("block_table[:num_blocks].long()", "block_table[:num_blocks].long().sort().values")],
    "drops the block that is not full": [("-(-seq_len // cache.shape[1])", "seq_len // cache.shape[1]")],
    "counts elements, not bytes": [("half[i].storage_offset() * half.itemsize", "half[i].storage_offset()")],
    "joins nothing": [("if runs and runs[-1][0] + runs[-1][1] == start:", "if False:")],
    "does not sort": [("in sorted(found)", "in found")],
}
