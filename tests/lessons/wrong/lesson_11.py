"""Wrong pairs and pieces."""

WRONG = {
    "goes by P's number of blocks on D's side": [
        ("to_base + (r * to.num_blocks + there)", "to_base + (r * layout.num_blocks + there)")
    ],
    "takes a block's id for its place in a list of whole blocks": [
        ("base + (r * layout.num_blocks + here) * size, to_base", "base + (here * layout.num_runs + r) * size, to_base")
    ],
    "merges what touches here only": [
        (
            "touches = piece.source == last.source + last.num_bytes, piece.target == last.target + last.num_bytes",
            "touches = (piece.source == last.source + last.num_bytes,)",
        )
    ],
    "does not merge": [("if pieces and all(touches):", "if False and all(touches):")],
    "merges in the order given": [("for piece in sorted(single):", "for piece in single:")],
    "sorts by target": [("sorted(single)", "sorted(single, key=lambda piece: piece.target)")],
    "never sends a last block that is not full": [
        ("-(-num_tokens // block_size) if whole", "num_tokens // block_size if whole")
    ],
    "sends a block that still grows": [("else num_computed // block_size", "else -(-num_computed // block_size)")],
    "sends the block of the output token": [("-(-num_tokens // block_size) if whole", "len(table) if whole")],
    "pairs D's blocks from the beginning of the prompt": [("theirs[start - first_block :]", "theirs[start:]")],
    "sends what D has": [("start = max(num_sent, first_block)", "start = num_sent")],
    "sends everything with each chunk": [("start = max(num_sent, first_block)", "start = first_block")],
}
