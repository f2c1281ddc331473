"""What a checkpoint says about its model: `config.json`, read once into a frozen `ModelConfig`.

One place knows the many spellings of the same fact (`rope_theta` here or inside `rope_parameters`, `torch_dtype` or
`dtype`, Qwen2's window that is only on from some layer upwards); everything after it reads plain fields. What we cannot
compute exactly (another architecture, another RoPE, quantised weights) is refused here, before a single weight is read:
a model that runs and is slightly wrong is worse than one that does not run.

Knows nothing of tensors: JSON in, a struct out, and torch is not imported. msgspec checks the types.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from nanopd.config import UserError, require

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
Size = Annotated[int, msgspec.Meta(gt=0, lt=2**31)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


@contextmanager
def blame(what: str) -> Iterator[None]:
    """Whatever goes wrong inside becomes a UserError that begins with `what`: files from elsewhere can hold anything."""
    try:
        yield
    except UserError as e:
        raise UserError(f"{what}: {e}") from e.__cause__
    except Exception as e:
        raise UserError(f"{what}: {str(e).strip() or type(e).__name__}") from e


def read_json(file: Path, optional: bool = False) -> dict[str, Any]:
    """The object in a JSON file, {} for an optional one that is not there. Raises UserError if it is no such thing."""
    with blame(f"{file.name} is no valid JSON object"):
        return msgspec.json.decode(b"{}" if optional and not file.exists() else file.read_bytes(), type=dict[str, Any])


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One decoder-only model of the Llama family. Sizes are in elements, lengths in tokens.

    Fields with a `name`, and those not set in `from_hf`, are config.json's.
    """

    architecture: str
    dtype: Literal["float32", "bfloat16", "float16"]
    hidden_act: Literal["silu"] = "silu"
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_layers: Size = msgspec.field(name="num_hidden_layers")
    num_heads: Size = msgspec.field(name="num_attention_heads")
    num_kv_heads: Size = msgspec.field(name="num_key_value_heads")
    head_dim: Size
    max_position_embeddings: Size
    rms_norm_eps: Positive = 1e-6
    tie_word_embeddings: bool = False
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool = False
    qk_norm: bool
    rope_theta: Positive
    # All that config.json says about a RoPE other than the default one, for transformers to make sense of.
    scaled_rope: dict[str, Any] | None
    # Per layer: a query sees the last `window` positions, itself among them; None sees everything before it.
    sliding_window: tuple[Size | None, ...]
    # Every id that ends a text, from config.json and generation_config.json.
    eos_token_ids: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> "ModelConfig":
        """From config.json and, if there is one, generation_config.json.

        Raises UserError for a model that is not supported, ValueError or TypeError for values of the wrong kind.
        """
        given = {name: value for name, value in raw.items() if value is not None}
        name = given.get("architectures", ["none"])[0]
        require(name in ARCHITECTURES, f"architecture {name!r} is not supported; supported: {ARCHITECTURES}.")
        require("quantization_config" not in given, "quantised checkpoints are not supported, except as .gguf files.")
        require(not given.get("use_sliding_window"), "a sliding window in some of the layers is not supported.")
        layers, heads = given.get("num_hidden_layers", 0), given.get("num_attention_heads", 1)
        require(type(layers) is int and 0 < layers <= 1000, f"num_hidden_layers is {layers!r}; it must be 1 to 1000.")
        qwen2, qwen3 = name.startswith("Qwen2"), name.startswith("Qwen3")
        defaults = {"num_key_value_heads": heads, "head_dim": 128 if qwen3 else given.get("hidden_size", 0) // heads}
        ends = [given.get("eos_token_id"), (generation or {}).get("eos_token_id")]
        ids = [token for end in ends for token in (end if isinstance(end, list) else [end]) if token is not None]
        ours = {
            "architecture": name,
            "dtype": given.get("dtype", given.get("torch_dtype", "float32")).removeprefix("torch."),
            "qkv_bias": qwen2 or given.get("attention_bias", False),
            "o_bias": not qwen2 and given.get("attention_bias", False),
            "qk_norm": qwen3,
            # Mistral has one in every layer, or says null; Llama and Qwen may name one that is not used.
            "sliding_window": [raw.get("sliding_window", 4096) if name.startswith("Mistral") else None] * layers,
            "eos_token_ids": list(dict.fromkeys(ids)),  # each once, in order
        }
        config = msgspec.convert(defaults | given | _rope(given) | ours, cls)
        require(config.num_heads % config.num_kv_heads == 0, "attention heads must divide into key/value heads evenly.")
        require(config.head_dim % 2 == 0, f"head_dim is {config.head_dim}; rotary embeddings need it to be even.")
        return config


def _rope(given: Mapping[str, Any]) -> dict[str, Any]:
    """The two fields about RoPE. What a scaled one needs is found out where it is computed (`decoder.py`)."""
    rope = {"partial_rotary_factor": given.get("partial_rotary_factor", 1)}
    rope |= given.get("rope_scaling") or given.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    known = kind in ROPE_TYPES and rope["partial_rotary_factor"] == 1
    alike = not any(isinstance(value, dict) for value in rope.values())  # for all layers
    require(known and alike, f"RoPE {rope} is not supported; supported: {', '.join(ROPE_TYPES)}, of whole heads.")
    names = [n for n in given if "rope" in n or n in ("max_position_embeddings", "original_max_position_embeddings")]
    scaled = None if kind == "default" else {name: given[name] for name in names}
    return {"rope_theta": rope.get("rope_theta", given.get("rope_theta", 10_000.0)), "scaled_rope": scaled}
