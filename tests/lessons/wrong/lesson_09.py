"""Wrong paged attention."""

WRONG = {
    "does not shrink the sum": [("row_sum = row_sum * shrink + weight", "row_sum = row_sum + weight")],
    "does not shrink what is weighed": [("acc = acc * shrink[:, None] + weight", "acc = acc + weight")],
    "forgets the old maximum": [
        ("new_max = torch.maximum(row_max, scores.max(dim=1).values)", "new_max = scores.max(dim=1).values")
    ],
    "NaN for a row that sees nothing": [("pivot = new_max.masked_fill(new_max.isneginf(), 0.0)", "pivot = new_max")],
    "takes no maximum out": [
        ("pivot = new_max.masked_fill(new_max.isneginf(), 0.0)", "pivot = new_max = torch.zeros_like(new_max)")
    ],
    "divides zero by zero": [("total = row_sum.masked_fill(row_sum == 0, 1.0)", "total = row_sum")],
    "merges by the plain mean": [("(outs * weight[:, :, None]).sum(dim=0) / total[:, None]", "outs.mean(dim=0)")],
    "merges without taking the maximum out": [
        (
            "weight = (lses - top.masked_fill(top.isneginf(), 0.0)).exp()\n    total = weight.sum(dim=0).clamp(min=1.0)",
            "weight, top = lses.exp(), 0.0\n    total = weight.sum(dim=0)",
        )
    ],
    "a token does not see itself": [("masked_fill(j > position,", "masked_fill(j >= position,")],
    "positions from the start of the chunk": [
        ("torch.arange(seq_len - num_tokens, seq_len)", "torch.arange(num_tokens)")
    ],
    "deals query heads out in turn": [
        ("heads = slice(head * group, (head + 1) * group)", "heads = slice(head, None, num_kv_heads)")
    ],
    "reads whole tiles": [
        ("j = torch.arange(first, min(first + tile, stop))", "j = torch.arange(first, first + tile)")
    ],
    "leaves out what does not divide": [
        ("per_split = -(-seq_len // num_splits)", "per_split = max(1, seq_len // num_splits)")
    ],
    "all at once": [
        ("range(split * per_split, stop, tile)", "range(split * per_split, stop, per_split)"),
        ("min(first + tile, stop)", "stop"),
    ],
}
