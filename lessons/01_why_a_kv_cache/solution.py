"""The solution of exercise 01."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """A decoder: what its config.json says. The head is hidden_size x vocab_size; all matrices are without a bias."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int


@dataclass(frozen=True)
class Work:
    """One request in one step: `num_new` tokens on top of `num_computed`; with `sampled` its last token needs logits."""

    num_computed: int
    num_new: int
    sampled: bool = True


@dataclass(frozen=True)
class Machine:
    """Its two speeds: FLOPs a second, and bytes a second from memory."""

    flops: float
    bandwidth: float


def layer_weights(sizes: Sizes) -> int:
    """Numbers in all matrices of all layers. A layer has Q, K, V and output projections, and an MLP of three matrices:
    gate and up (hidden to intermediate), down (back)."""
    q, kv = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    return sizes.num_layers * sizes.hidden_size * (q + 2 * kv + q + 3 * sizes.intermediate_size)


def kv_bytes_per_token(sizes: Sizes, itemsize: int) -> int:
    """What the KV cache holds for one token, over all layers. `itemsize`: bytes of one number."""
    return sizes.num_layers * 2 * sizes.num_kv_heads * sizes.head_dim * itemsize


def flops(sizes: Sizes, step: Sequence[Work]) -> int:
    """FLOPs of a step: 2 for each weight that a token is multiplied with, 4 for each number of a query and each position
    it sees. A token sees itself and all tokens of its request before it. The head is needed for sampled tokens only."""
    tokens = sum(work.num_new for work in step)
    sampled = sum(work.sampled for work in step)
    pairs = sum(w.num_computed * w.num_new + w.num_new * (w.num_new + 1) // 2 for w in step)
    attention = 4 * sizes.num_layers * sizes.num_heads * sizes.head_dim * pairs
    return 2 * layer_weights(sizes) * tokens + 2 * sizes.hidden_size * sizes.vocab_size * sampled + attention


def bytes_moved(sizes: Sizes, step: Sequence[Work], itemsize: int) -> int:
    """Bytes of a step: the matrices once (the head only if anybody is sampled), K and V of every computed token read once,
    K and V of every new token written once."""
    weights = layer_weights(sizes)
    if any(work.sampled for work in step):
        weights += sizes.hidden_size * sizes.vocab_size
    tokens = sum(work.num_computed + work.num_new for work in step)
    return weights * itemsize + tokens * kv_bytes_per_token(sizes, itemsize)


def seconds(sizes: Sizes, step: Sequence[Work], itemsize: int, machine: Machine) -> float:
    """The roofline: the least time the step can take, if computing and reading overlap perfectly."""
    return max(flops(sizes, step) / machine.flops, bytes_moved(sizes, step, itemsize) / machine.bandwidth)


def ridge_batch(sizes: Sizes, context: int, itemsize: int, machine: Machine) -> int | None:
    """The smallest batch of decodes at which computing takes at least as long as reading. Every request has `context`
    computed tokens, one new one, and is sampled. None: no batch does, however large."""
    one, two = [Work(context, 1)], [Work(context, 1)] * 2
    # Each request more adds this much; and the weights are there once, whatever the batch.
    computing = flops(sizes, one) / machine.flops
    reading = (bytes_moved(sizes, two, itemsize) - bytes_moved(sizes, one, itemsize)) / machine.bandwidth
    weights = bytes_moved(sizes, one, itemsize) / machine.bandwidth - reading
    if computing <= reading:
        return None
    return max(1, math.ceil(weights / (computing - reading)))
