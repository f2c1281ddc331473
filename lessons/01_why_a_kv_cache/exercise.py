"""Exercise 01: what a step costs.

Write the cost model of a decoder: FLOPs and bytes of any step, from the model's sizes alone. `nanopd grade 01 exercise.py`
holds it against what is counted inside the real engine, for every step that the scheduler plans.

What counts: matrix products, attention, and the bytes of matrices, K and V. Norms, activations, the lookup of
embeddings and sampling do not; neither does anything that a backend does beyond what is needed.
"""

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
    raise NotImplementedError("layer_weights")


def kv_bytes_per_token(sizes: Sizes, itemsize: int) -> int:
    """What the KV cache holds for one token, over all layers. `itemsize`: bytes of one number."""
    raise NotImplementedError("kv_bytes_per_token")


def flops(sizes: Sizes, step: Sequence[Work]) -> int:
    """FLOPs of a step: 2 for each weight that a token is multiplied with, 4 for each number of a query and each position
    it sees. A token sees itself and all tokens of its request before it. The head is needed for sampled tokens only."""
    raise NotImplementedError("flops")


def bytes_moved(sizes: Sizes, step: Sequence[Work], itemsize: int) -> int:
    """Bytes of a step: the matrices once (the head only if anybody is sampled), K and V of every computed token read once,
    K and V of every new token written once."""
    raise NotImplementedError("bytes_moved")


def seconds(sizes: Sizes, step: Sequence[Work], itemsize: int, machine: Machine) -> float:
    """The roofline: the least time the step can take, if computing and reading overlap perfectly."""
    raise NotImplementedError("seconds")


def ridge_batch(sizes: Sizes, context: int, itemsize: int, machine: Machine) -> int | None:
    """The smallest batch of decodes at which computing takes at least as long as reading. Every request has `context`
    computed tokens, one new one, and is sampled. None: no batch does, however large."""
    raise NotImplementedError("ridge_batch")
