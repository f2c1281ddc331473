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

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanopd.config import require
from nanopd.models.config import ModelConfig

# attend(layer, query, key, value) stores this layer's new keys and values and attends to all those the query may see.
# query [T, Hq, D], key and value [T, Hkv, D] -> [T, Hq, D], all in the model's dtype. Applies the scale D**-0.5 and the
# layer's `ModelConfig.sliding_window`. `value` is a view into a wider tensor: contiguous in D, not in T.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Elementwise:
    """What a layer does beside products and attention. `kernels/cpu_elementwise.py` does the same, in one pass each."""

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last dimension, all of it in float32 and then rounded (Zhang & Sennrich, 2019)."""
        return F.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turns the pairs (x[i], x[i + D/2]) by their angles. x [T, heads, D], cos and sin [T, 1, D/2] -> [T, heads, D]."""
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    @staticmethod
    def silu_and_mul(gate_up: Tensor) -> Tensor:
        """SwiGLU: the gate decides how much of `up` passes (Shazeer, 2020). [T, 2 I] -> [T, I]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)


class Module(nn.Module):
    """A torch module whose calls have a type: they give one tensor."""

    __call__: Callable[..., Tensor]
    elementwise: Any = Elementwise


class Linear(nn.Linear):
    """y = x W^T + b: [T, in] -> [T, out]. Every matrix product of the model is one of these; see `pack`."""

    __call__: Callable[..., Tensor]
    packed: Any = None

    def reset_parameters(self) -> None:
        """No random numbers: the weights come from a file, and drawing them would take seconds."""

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is None:
            return super().forward(x)
        if isinstance(self.packed, Tensor):
            return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")  # type: ignore[no-any-return]
        return torch.ops.quantized.linear_dynamic_fp16(x.float(), self.packed).to(x.dtype)  # type: ignore[no-any-return]


def pack(module: nn.Module, native: bool) -> None:
    """Keeps a Linear's W tile by tile, as products read it. For x86 CPUs, in place, once: `model.apply(pack)`.

    `F.linear` gets W row by row, and with 2 rows of x or more copies it into tiles in each call. The tiles are oneDNN's
    where the processor knows W's type (`native`: bfloat16); for 1 to 64 rows a product then takes 0.5 to 0.9 of the
    time. Else they are FBGEMM's, in float16: with few rows a product takes as long as W needs to come from memory, and half
    the bytes take half the time. The arithmetic is that of float32: each number is widened on its way into a register.

    Not in float16 if that is too coarse: if a number would move by more than 2^-22 of the largest, and a float32 sum of
    hundreds of products is no more exact than that. Numbers from bfloat16 or float16 do not move, or from nearly 0 (below
    2^-17) by 2^-25 at most.
    """
    if not isinstance(module, Linear):
        return
    if native:
        module.packed = torch.ops.mkldnn._reorder_linear_weight(module.weight)
        del module.weight
        return
    weight, bias = module.weight.float(), None if module.bias is None else module.bias.float()
    if (weight.half() - weight).abs().max() <= weight.abs().max() * 2**-22:
        module.packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
        del module.weight


class RMSNorm(Module):
    """A norm and its weights, one for each dimension."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.elementwise.rms_norm(x, self.weight, self.eps)  # type: ignore[no-any-return]


def rope_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Radians per position for each pair of dimensions, [D/2] float32, and a factor for cos and sin.

    Pair i turns by theta^(-2i/D) a position: the first a whole radian, the last hardly at all (Su et al. 2021, RoPE).
    A scaled RoPE stretches the context by turning more slowly: all pairs alike (linear), or only the slow ones, which
    never completed a turn within the trained length (llama3; yarn, Peng et al. 2023). transformers computes those; it
    takes a second to import, so only they pay for it.
    """
    if config.scaled_rope is None:
        return 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim), 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs = LlamaConfig(head_dim=config.head_dim, **config.scaled_rope)
    inv_freq, factor = ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]](theirs)
    require(bool((inv_freq * factor).isfinite().all()), f"RoPE's frequencies are no numbers: {inv_freq * factor}.")
    return inv_freq, factor


class Attention(Module):
    """Grouped-query attention: Hq / Hkv query heads share one key-value head (Ainslie et al., 2023)."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.sizes = (q_size, kv_size, kv_size)  # one product makes Q, K and V
        self.qkv_proj = Linear(config.hidden_size, sum(self.sizes), bias=config.qkv_bias)
        self.o_proj = Linear(q_size, config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        qkv = self.qkv_proj(x).split_with_sizes(self.sizes, dim=-1)
        q, k, v = (part.view(len(x), -1, self.head_dim) for part in qkv)  # [T, Hq, D], 2 x [T, Hkv, D]
        q, k = (self.elementwise.rotate(x, cos, sin) for x in (self.q_norm(q), self.k_norm(k)))
        return self.o_proj(attend(self.layer, q, k, v).flatten(-2))


class MLP(Module):
    """Two products, SwiGLU, and a third."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = Linear(hidden, 2 * inner, bias=config.mlp_bias)
        self.down_proj = Linear(inner, hidden, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.elementwise.silu_and_mul(self.gate_up_proj(x)))


class Layer(Module):
    """Attention, where tokens meet, then the MLP, each on a normed copy and added back."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        h = self.self_attn(self.input_layernorm(h), cos, sin, attend).add_(h)
        return self.mlp(self.post_attention_layernorm(h)).add_(h)


class Decoder(Module):
    """The whole model. Weights are left empty: `loader.load_model` fills them.

    Positions must lie below `max_model_len`; the tables of RoPE reach that far and no further.
    """

    cos: Tensor  # [max_model_len, D/2], the model's dtype
    sin: Tensor

    def __init__(self, config: ModelConfig, max_model_len: int):
        super().__init__()
        self.config, self.max_model_len = config, max_model_len
        size = (config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding(*size, _weight=torch.empty(size))  # else it fills itself with random numbers
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        # On the CPU whatever the default device: the same bits everywhere, and real even in a model built on "meta".
        with torch.device("cpu"):
            inv_freq, factor = rope_frequencies(config)
            angles = torch.arange(max_model_len).float().outer(inv_freq)
        self.register_buffer("cos", angles.cos() * factor, persistent=False)
        self.register_buffer("sin", angles.sin() * factor, persistent=False)
        self.requires_grad_(False)

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
