"""What a layer does beside products and attention, on a CPU: each in one pass over the numbers, compiled by Numba.

In torch each root, product and sum is an operation of its own. A decode of one request waits for what it costs to call
them; a step of 2,048 tokens for memory, which each of them reads and writes. Here a number is read once, and what comes
of it stays in float32 until it is written. Same functions as `decoder.Elementwise`, which is the reference.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def"

import math
from functools import partial

import numpy as np
from torch import Tensor

from nanopd.kernels.cpu import exp2, narrow, over, widen

over_tokens = partial(
    over, parallel_from=32
)  # with fewer a second thread is not worth the microseconds it takes to begin


@over_tokens
def _rms_norm(first, last, x, weight, eps, out):
    size = x.shape[1]
    for t in range(first, last):
        squares = np.float32(0)
        for i in range(size):
            squares += widen(x[t, i]) * widen(x[t, i])
        scale = np.float32(1 / math.sqrt(squares / size + eps))
        for i in range(size):
            out[t, i] = narrow(widen(x[t, i]) * scale * widen(weight[i]), out[t, i])


@over_tokens
def _rotate(first, last, x, step, cos, sin, out):
    heads, half = len(out) // len(cos), cos.shape[1]
    for t in range(first, last):
        for h in range(heads):
            row, out_row = t * step + h, t * heads + h
            for i in range(half):
                a, b, c, s = widen(x[row, i]), widen(x[row, half + i]), widen(cos[t, i]), widen(sin[t, i])
                out[out_row, i] = narrow(a * c - b * s, out[out_row, i])
                out[out_row, half + i] = narrow(b * c + a * s, out[out_row, i])


@over_tokens
def _silu_and_mul(first, last, x, out):
    size = out.shape[1]
    for t in range(first, last):
        for i in range(size):
            gate = widen(x[t, i])
            small = exp2(-abs(gate) * np.float32(1 / math.log(2)))  # e^-|gate|
            sigmoid = (small if gate < 0 else np.float32(1)) / (np.float32(1) + small)
            out[t, i] = narrow(gate * sigmoid * widen(x[t, size + i]), out[t, i])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H], weight [H] -> [..., H]."""
    rows = x.reshape(-1, x.shape[-1])
    out = rows.new_empty(rows.shape)
    _rms_norm(len(rows), rows, weight, np.float32(eps), out)
    return out.view(x.shape)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, D], each token's heads side by side; cos and sin [T, 1, D/2] -> [T, heads, D]."""
    (num_tokens, heads, size), step = x.shape, x.stride(0) // x.shape[2]
    rows = x.as_strided([(num_tokens - 1) * step + heads, size], [size, 1])
    out = x.new_empty(num_tokens * heads, size)
    _rotate(num_tokens, rows, step, cos.squeeze(1), sin.squeeze(1), out)
    return out.view(x.shape)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 I], gate and up side by side -> [T, I]."""
    num_tokens, size = gate_up.shape
    out = gate_up.new_empty(num_tokens, size // 2)
    _silu_and_mul(num_tokens, gate_up, out)
    return out
