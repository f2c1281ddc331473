"""Wrong batches."""

WRONG = {
    "every chunk begins at position 0": [(" + num_computed[request]\n", "\n")],
    "one request's table for all": [
        ("block_table[request, positions // block_size]", "block_table[0, positions // block_size]")
    ],
    "forgets the place inside the block": [(" * block_size + positions % block_size", " * block_size")],
    "looks up the table by the place in the batch": [
        ("block_table[request, positions // block_size]", "block_table[request, np.arange(len(request)) // block_size]")
    ],
    "lengths before the step": [("        seq_lens=seq_lens,\n", "        seq_lens=num_computed,\n")],
    "samples everyone": [("np.flatnonzero(seq_lens == num_tokens)", "np.arange(len(query_lens))")],
    "samples decodes only": [("np.flatnonzero(seq_lens == num_tokens)", "np.flatnonzero(query_lens == 1)")],
    "samples from the first new token": [("query_start_loc[sampled + 1] - 1", "query_start_loc[sampled]")],
    "one row too far": [("query_start_loc[sampled + 1] - 1", "query_start_loc[sampled + 1]")],
    "no last bound": [
        ("np.concatenate([[0], np.cumsum(query_lens)])", "np.cumsum(query_lens) - query_lens"),
        ("query_start_loc[sampled + 1] - 1", "query_start_loc[sampled] + query_lens[sampled] - 1"),
    ],
    "padding writes to slot 0": [(", constant_values=PAD_SLOT", "")],
    "padding ends at 0": [(', mode="edge"', "")],
}
