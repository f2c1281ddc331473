"""Exercise 07: from a plan to a flat batch.

The scheduler says how many tokens each request computes in this step. You lay them out for the device: ids, positions,
slots, bounds, and the rows from which logits are made. `nanopd grade 07 exercise.py` puts your function into the real model
runner: the model sees your ids and positions, attention your bounds and lengths, K and V go to your slots, and the tokens
that come out are those of your rows.

numpy is at hand; loops are as good as `np.repeat` and `np.cumsum`. Rules: K1, S1; see lessons/rules.md.
"""

from dataclasses import dataclass

import numpy as np

PAD_SLOT = -1  # nothing is written


@dataclass
class Inputs:
    """One step's batch of R requests and T new tokens; S of the requests catch up in it. All of it whole numbers."""

    input_ids: np.ndarray  # [T]: the new tokens of all requests, one request behind the other
    positions: np.ndarray  # [T]: where each stands in its own request, from 0
    slot_mapping: np.ndarray  # [T]: where its K and V go (K1)
    query_start_loc: np.ndarray  # [R + 1]: where each request's tokens begin in the batch, and at last T
    seq_lens: np.ndarray  # [R]: tokens that each request has in the cache after this step
    sampled: np.ndarray  # [S]: which of the R requests catch up, from 0
    logits_indices: np.ndarray  # [S]: the row, of T, of each one's last token


def prepare_inputs(
    query_lens: np.ndarray,
    num_computed: np.ndarray,
    num_tokens: np.ndarray,
    token_ids: np.ndarray,
    block_table: np.ndarray,
    block_size: int,
) -> Inputs:
    """The batch of one step.

    Args:
        query_lens: [R], new tokens of each request in this step, at least 1.
        num_computed: [R], tokens that are in the cache before this step.
        num_tokens: [R], all that the request has: prompt and output so far. It catches up when that many are computed.
        token_ids: [R, longest request], a row for each; behind `num_tokens` it holds some earlier request's.
        block_table: [R, longest table], int32, a row for each; behind a request's last block it means nothing.
        block_size: tokens in a block.
    """
    raise NotImplementedError("prepare_inputs")


def pad_decodes(inputs: Inputs, size: int) -> Inputs:
    """A batch in which each request computes one token, made as large as a captured graph.

    Requests without tokens are added behind, until `size` rows are there: id 0, position 0, no slot, no length. A request
    without tokens ends in the batch where it begins. Nothing is sampled from it. `inputs` is left as it is.
    """
    raise NotImplementedError("pad_decodes")
