"""The one decoder: Llama, Mistral, Qwen2 and Qwen3 differ only in a few booleans of `ModelConfig`.

    h = E[ids]
    per layer:  h += W_o attend(rope(norm(h) W_q), rope(norm(h) W_k), norm(h) W_v)
                h += W_down (silu(norm(h) W_gate) * (norm(h) W_up))
    logits = norm(h) W_head

Tokens are flat: T tokens of any number of requests, one behind the other, each with its own position. The decoder does
not know about requests, batches, blocks or caches: whoever runs it hands in `attend`, the only place where one token
meets another. Everything else is per token, so a batch can be cut up in any way and the result stays the same.

Where transformers computes in float32 (norms, the tables of RoPE), so do we. Shapes: T tokens, H hidden size, Hq / Hkv
query / key-value heads, D head_dim, V vocabulary.
"""

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanopd.models.config import ModelConfig, RopeConfig


class Attend(Protocol):
    """Stores this layer's new keys and values and attends to all those the query may see.

    query [T, Hq, D], key and value [T, Hkv, D] -> [T, Hq, D], all in the model's dtype. Applies the scale D**-0.5 and
    the layer's `ModelConfig.sliding_window`. `value` is a view into a wider tensor: contiguous in D, not in T.
    """

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor: ...


class Module(nn.Module):
    """A torch module whose calls have a type: they give one tensor."""

    __call__: Callable[..., Tensor]


class Linear(Module):
    """y = x W^T + b: [T, in] -> [T, sum(out)]. Every matrix product of the model goes through here.

    Several outputs make one product instead of many (Q, K, V; gate, up): `out_sizes` says where to split. The one seam
    at which a backend may keep the weights in a layout of its own.
    """

    def __init__(self, in_size: int, *out_sizes: int, bias: bool = False):
        super().__init__()
        self.out_sizes = out_sizes
        self.weight = nn.Parameter(torch.empty(sum(out_sizes), in_size))
        self.bias = nn.Parameter(torch.empty(sum(out_sizes))) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Embedding(Module):
    """Row `id` of a table [V, H]. Not nn.Embedding: that fills itself with random numbers first."""

    def __init__(self, rows: int, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, size))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class RMSNorm(Module):
    """x / rms(x) * w over the last dimension, in float32 up to the product with w (Zhang & Sennrich, 2019)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Radians per position for each pair of dimensions, [D/2] float32, and a factor for cos and sin.

    A scaled RoPE stretches the context by `factor` by turning more slowly: all pairs alike (linear), or only the slow
    ones, which never completed a turn within the trained length, with a ramp in between (llama3, yarn).
    Su et al. 2021 (RoPE), Peng et al. 2023 (YaRN); numbers as in transformers/modeling_rope_utils.py.
    """
    inv_freq = 1.0 / rope.rope_theta ** (torch.arange(0, head_dim, 2, device="cpu").float() / head_dim)
    trained = rope.original_max_position_embeddings
    if rope.freq_factors is not None:
        return inv_freq / torch.tensor(rope.freq_factors, device="cpu"), 1.0
    if rope.rope_type == "linear":
        return inv_freq / rope.factor, 1.0
    if rope.rope_type == "llama3":
        turns = trained * inv_freq / (2 * math.pi)  # within the trained length
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = keep.clamp(0, 1)  # 1: turns often, stays; 0: never turned round, slowed down
        return (1 - keep) * inv_freq / rope.factor + keep * inv_freq, 1.0
    if rope.rope_type == "yarn":

        def pair_that_turns(times: float) -> float:
            return head_dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

        low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        ramp = (torch.arange(head_dim // 2, device="cpu").float() - low) / ((high - low) or 0.001)
        keep = 1 - ramp.clamp(0, 1)
        return (1 - keep) * inv_freq / rope.factor + keep * inv_freq, _yarn_attention_factor(rope)
    return inv_freq, 1.0


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """Longer contexts flatten the softmax; YaRN sharpens it again by scaling q and k."""

    def sharpen(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return sharpen(rope.mscale) / sharpen(rope.mscale_all_dim)
    return sharpen(1.0)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (x[i], x[i + D/2]) by their angles. x [T, heads, D], cos and sin [T, 1, D/2] -> [T, heads, D]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(Module):
    """Grouped-query attention: Hq / Hkv query heads share one key-value head (Ainslie et al., 2023)."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv_proj = Linear(config.hidden_size, q_size, kv_size, kv_size, bias=config.qkv_bias)
        self.o_proj = Linear(q_size, config.hidden_size, bias=config.o_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.qk_norm = config.qk_norm

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        qkv = self.qkv_proj(x).split_with_sizes(self.qkv_proj.out_sizes, dim=-1)
        q, k, v = (part.view(len(x), -1, self.head_dim) for part in qkv)  # [T, Hq, D], 2 x [T, Hkv, D]
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        out = attend(self.layer, rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.o_proj(out.flatten(-2))


class MLP(Module):
    """SwiGLU: the gate decides how much of `up` passes (Shazeer, 2020)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = Linear(hidden, inner, inner, bias=config.mlp_bias)
        self.down_proj = Linear(inner, hidden, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Layer(Module):
    """Attention, where tokens meet, then the MLP, each on a normed copy and added back."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        h = h + self.self_attn(self.input_layernorm(h), cos, sin, attend)
        return h + self.mlp(self.post_attention_layernorm(h))


class Decoder(Module):
    """The whole model. Weights are left empty: `loader.load_model` fills them.

    Positions must lie below `max_model_len`; the tables of RoPE reach that far and no further.
    """

    cos: Tensor  # [max_model_len, D/2], the model's dtype
    sin: Tensor

    def __init__(self, config: ModelConfig, max_model_len: int):
        super().__init__()
        self.config, self.max_model_len = config, max_model_len
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.tie()
        # On the CPU whatever the default device: the same bits everywhere, and real even in a model built on "meta".
        inv_freq, factor = rope_frequencies(config.rope, config.head_dim)
        angles = torch.arange(max_model_len, device="cpu").float().outer(inv_freq)
        self.register_buffer("cos", angles.cos() * factor, persistent=False)
        self.register_buffer("sin", angles.sin() * factor, persistent=False)
        self.requires_grad_(False)

    def tie(self) -> None:
        """Makes the head and the embedding one parameter, if the model shares them."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """input_ids and positions [T] int64 -> hidden states after the last norm, [T, H] in the model's dtype."""
        h = self.embed_tokens(input_ids)
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)  # [T, 1, D/2]
        for layer in self.layers:
            h = layer(h, cos, sin, attend)
        return self.norm(h)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, H], usually only the rows that will be sampled from -> [n, V] float32."""
        return self.lm_head(hidden).float()
