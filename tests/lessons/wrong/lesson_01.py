"""Wrong cost models."""

WRONG = {
    "K and V as wide as the queries": [
        ("(q + 2 * kv + q + 3 * sizes.intermediate_size)", "(4 * q + 3 * sizes.intermediate_size)")
    ],
    "an MLP of two matrices": [("q + 3 * sizes.intermediate_size", "q + 2 * sizes.intermediate_size")],
    "keys without values": [("sizes.num_layers * 2 * sizes.num_kv_heads", "sizes.num_layers * sizes.num_kv_heads")],
    "a cache for every query head": [
        ("* sizes.num_kv_heads * sizes.head_dim * itemsize", "* sizes.num_heads * sizes.head_dim * itemsize")
    ],
    "one FLOP a weight": [("2 * layer_weights(sizes) * tokens", "layer_weights(sizes) * tokens")],
    "logits for every token": [("sampled = sum(work.sampled for work in step)", "sampled = tokens")],
    "no causal mask": [("w.num_new * (w.num_new + 1) // 2", "w.num_new * w.num_new")],
    "a token does not see itself": [("w.num_new * (w.num_new + 1) // 2", "w.num_new * (w.num_new - 1) // 2")],
    "weights once for each request": [
        ("    return weights * itemsize + tokens", "    return len(step) * weights * itemsize + tokens")
    ],
    "the head is always read": [("    if any(work.sampled for work in step):\n", "    if True:\n")],
    "new K and V cost nothing": [("sum(work.num_computed + work.num_new for", "sum(work.num_computed for")],
    "one after the other": [
        (
            "max(flops(sizes, step) / machine.flops, bytes_moved(sizes, step, itemsize) / machine.bandwidth)",
            "flops(sizes, step) / machine.flops + bytes_moved(sizes, step, itemsize) / machine.bandwidth",
        )
    ],
    "only weights are read": [("math.ceil(weights / (computing - reading))", "math.ceil(weights / computing)")],
    "there is always a batch": [
        ("    if computing <= reading:\n        return None\n", "    if computing <= reading:\n        return 10**9\n")
    ],
    "rounds down": [("math.ceil(", "math.floor(")],
}
