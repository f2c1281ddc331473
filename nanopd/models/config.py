"""What a checkpoint says about its model: `config.json`, read once into a frozen `ModelConfig`.

One place knows the many spellings of the same fact (`rope_theta` here or inside `rope_parameters`, `torch_dtype` or
`dtype`, Qwen2's window that is only on from some layer upwards); everything after it reads plain fields. What we cannot
compute exactly (another architecture, another RoPE, quantised weights) is refused here, before a single weight is read:
a model that runs and is slightly wrong is worse than one that does not run.

Knows nothing of tensors: JSON in, dataclass out, and torch is not imported.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from nanopd.config import UserError

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ARCHITECTURES = {f"{kind.capitalize()}ForCausalLM": kind for kind in MODEL_TYPES}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DTYPES = ("float32", "bfloat16", "float16")


def require(holds: bool, sentence: str) -> None:
    """Raises UserError(sentence) unless it holds: the checks of what a model's files may contain."""
    if not holds:
        raise UserError(sentence)


def read_json(file: Path, optional: bool = False) -> dict[str, Any]:
    """The object in a JSON file, {} for an optional one that is not there. Raises UserError if it is no such thing."""
    try:
        value = json.loads(file.read_text(encoding="utf-8")) if file.exists() or not optional else {}
    except (ValueError, OSError, RecursionError) as e:
        raise UserError(f"{file.name} is not valid JSON ({e}).") from e
    require(isinstance(value, dict), f"{file.name} must hold a JSON object.")
    return dict(value)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding; the names are those of `rope_parameters` in config.json. Lengths are in tokens."""

    original_max_position_embeddings: float
    rope_type: str = "default"
    rope_theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    # One divisor per frequency, head_dim / 2 of them: how GGUF files spell llama3 scaling.
    freq_factors: tuple[float, ...] | None = None

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> "RopeConfig":
        """`raw` is the whole config.json. Raises UserError for a RoPE we do not compute."""
        given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
        flat = isinstance(given, Mapping) and not any(isinstance(value, Mapping) for value in given.values())
        require(flat, "rope_parameters must be one flat object, the same for all layers.")
        rope = {"rope_theta": raw.get("rope_theta")} | {k: v for k, v in given.items() if v is not None}
        kind = rope["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
        require(kind in ROPE_TYPES, f"RoPE type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}.")
        partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
        require(partial in (None, 1), f"partial_rotary_factor is {partial}; only 1 is supported.")
        # A length beside rope_parameters wins over the one inside; without either, it was trained at its full length.
        length = raw.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
        rope["original_max_position_embeddings"] = length or raw["max_position_embeddings"]
        require(kind == "default" or "factor" in rope, f"RoPE type {kind!r} needs a factor.")
        rope = {f.name: rope[f.name] for f in fields(cls) if rope.get(f.name) is not None}
        for name in rope.keys() - {"rope_type", "truncate", "freq_factors"}:
            least = 1 if name == "rope_theta" else 0
            holds = _is_number(rope[name]) and rope[name] > least
            require(holds, f"{name} of RoPE is {rope[name]!r}; it must be a number above {least}.")
        return cls(**rope)


@dataclass(frozen=True)
class ModelConfig:
    """One decoder-only model of the Llama family. Sizes are in elements, lengths in tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    # Per layer: a query sees the last `window` positions, itself among them; None sees everything before it.
    sliding_window: tuple[int | None, ...]
    # Every id that ends a text, from config.json and generation_config.json.
    eos_token_ids: tuple[int, ...]
    dtype: str

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> "ModelConfig":
        """From config.json and, if there is one, generation_config.json. Raises UserError with what is wrong."""
        name = (raw.get("architectures") or [f"{raw.get('model_type', '?')}".capitalize() + "ForCausalLM"])[0]
        supported = ", ".join(ARCHITECTURES)
        require(name in ARCHITECTURES, f"architecture {name!r} is not supported; supported: {supported}.")
        quantised = bool(raw.get("quantization_config"))
        require(not quantised, "quantised checkpoints are not supported; use a bfloat16 one or a .gguf file.")
        activation = raw.get("hidden_act", "silu")
        require(activation == "silu", f"activation {activation!r} is not supported; supported: silu.")
        dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
        require(dtype in DTYPES, f"dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}.")

        kind = ARCHITECTURES[name]
        layers, heads = _positive(raw, "num_hidden_layers"), _positive(raw, "num_attention_heads")
        hidden, kv_heads = _positive(raw, "hidden_size"), _positive(raw, "num_key_value_heads", heads)
        head_dim = _positive(raw, "head_dim", 128 if kind == "qwen3" else hidden // heads)
        require(layers <= 1000, f"num_hidden_layers is {layers}; more than 1000 is not supported.")
        require(heads % kv_heads == 0, f"{heads} attention heads do not divide into {kv_heads} key/value heads.")
        require(head_dim % 2 == 0, f"head_dim is {head_dim}; rotary embeddings need it to be even.")
        eps = raw.get("rms_norm_eps", 1e-6)
        require(_is_number(eps) and eps >= 0, f"rms_norm_eps is {eps!r}; it must be a number, 0 or more.")
        attention_bias = kind in ("llama", "qwen3") and bool(raw.get("attention_bias"))
        return cls(
            architecture=name,
            vocab_size=_positive(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_positive(raw, "intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=eps,
            max_position_embeddings=_positive(raw, "max_position_embeddings"),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or kind == "qwen2",
            o_bias=attention_bias,
            mlp_bias=kind == "llama" and bool(raw.get("mlp_bias")),
            qk_norm=kind == "qwen3",
            rope=RopeConfig.from_hf(raw),
            sliding_window=_sliding_window(raw, kind, layers),
            eos_token_ids=_eos_token_ids(raw, generation or {}),
            dtype=dtype,
        )


def _sliding_window(raw: Mapping[str, Any], kind: str, layers: int) -> tuple[int | None, ...]:
    """Llama never has one, Mistral in every layer or none, Qwen only where it is switched on."""
    switched_on = kind == "mistral" or (kind != "llama" and raw.get("use_sliding_window"))
    if not switched_on or raw.get("sliding_window", 4096) is None:
        return (None,) * layers
    window, first = _positive(raw, "sliding_window", 4096), 0 if kind == "mistral" else raw.get("max_window_layers", 28)
    types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    types = types if kind == "mistral" else raw.get("layer_types") or types
    known = len(types) == layers and set(types) <= {"sliding_attention", "full_attention"}
    require(known, f"layer_types must be {layers} times full_attention or sliding_attention.")
    return tuple(window if name == "sliding_attention" else None for name in types)


def _eos_token_ids(*configs: Mapping[str, Any]) -> tuple[int, ...]:
    given = [config.get("eos_token_id") for config in configs]
    ids = [token for eos in given for token in (eos if isinstance(eos, list) else [eos]) if token is not None]
    require(all(type(t) is int and t >= 0 for t in ids), f"eos_token_id is {ids}; it must be token ids.")
    return tuple(dict.fromkeys(ids))  # each once, in order


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < float("inf")


def _positive(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = default if raw.get(name) is None else raw[name]
    require(value is not None, f"{name} is missing.")
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31:
        return value
    raise UserError(f"{name} is {value!r}; it must be a whole number above 0.")
