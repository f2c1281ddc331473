"""Exercise 07: from a plan to a flat batch. The reference solution."""

from dataclasses import dataclass, replace

import numpy as np

PAD_SLOT = -1


@dataclass
class Inputs:
    """One step's batch of R requests and T new tokens; S of the requests catch up in it."""

    input_ids: np.ndarray  # [T]
    positions: np.ndarray  # [T]
    slot_mapping: np.ndarray  # [T]
    query_start_loc: np.ndarray  # [R + 1]
    seq_lens: np.ndarray  # [R]
    sampled: np.ndarray  # [S]
    logits_indices: np.ndarray  # [S]


def prepare_inputs(
    query_lens: np.ndarray,
    num_computed: np.ndarray,
    num_tokens: np.ndarray,
    token_ids: np.ndarray,
    block_table: np.ndarray,
    block_size: int,
) -> Inputs:
    query_start_loc = np.concatenate([[0], np.cumsum(query_lens)])
    request = np.repeat(np.arange(len(query_lens)), query_lens)
    positions = np.arange(len(request)) - query_start_loc[request] + num_computed[request]
    slots = block_table[request, positions // block_size] * block_size + positions % block_size
    seq_lens = num_computed + query_lens
    sampled = np.flatnonzero(seq_lens == num_tokens)
    return Inputs(
        input_ids=token_ids[request, positions],
        positions=positions,
        slot_mapping=slots,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        sampled=sampled,
        logits_indices=query_start_loc[sampled + 1] - 1,
    )


def pad_decodes(inputs: Inputs, size: int) -> Inputs:
    more = size - len(inputs.positions)
    return replace(
        inputs,
        input_ids=np.pad(inputs.input_ids, (0, more)),
        positions=np.pad(inputs.positions, (0, more)),
        slot_mapping=np.pad(inputs.slot_mapping, (0, more), constant_values=PAD_SLOT),
        query_start_loc=np.pad(inputs.query_start_loc, (0, more), mode="edge"),
        seq_lens=np.pad(inputs.seq_lens, (0, more)),
    )
