"""Reads a .gguf file (llama.cpp's format) as if it were a Hugging Face checkpoint.

The `gguf` package reads the file and de-quantises the weights; that takes seconds, and is the price of the format.

What llama.cpp does differently is undone here: names; dimensions listed innermost first; and for the architecture
"llama" (Mistral's too) the order of the rows of Q and K, since llama.cpp rotates neighbours (x[2i], x[2i + 1]) where
we rotate halves (x[i], x[i + D/2]).
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from nanopd.config import UserError
from nanopd.models.config import require

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj"}
LAYER |= {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"} | {f"attn_{x}_norm": f"self_attn.{x}_norm" for x in "qk"}
LAYER |= {f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}


class TensorRef(NamedTuple):
    """A tensor still in its file: its shape, and how to read it."""

    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


def read(path: Path) -> tuple[dict[str, Any], dict[str, TensorRef]]:
    """The model as config.json would describe it, and its tensors by their Hugging Face names, read as float32.

    Raises UserError for a damaged file or a model we cannot run.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        # Strings by the thousand (the vocabulary) are slow to read, and nothing here asks for them.
        meta = {
            name: f.contents() for name, f in reader.fields.items() if name[:14] != "tokenizer.ggml" or "_id" in name
        }
        tensors = {}
        for t in reader.tensors:
            shape = tuple(int(n) for n in reversed(t.shape))
            tensors[_hf_name(t.name)] = TensorRef(shape, partial(_dequantize, t.data, t.tensor_type))
        return _config(meta, tensors), tensors
    except UserError:
        raise
    except (ValueError, LookupError, TypeError, ArithmeticError, OSError, AttributeError) as e:
        raise UserError(f"this GGUF file is cut short or damaged ({e}).") from e


def _hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; a name we do not know stays as it is."""
    head, *middle, last = name.split(".")
    if head == "blk" and len(middle) == 2 and middle[1] in LAYER:
        return f"model.layers.{middle[0]}.{LAYER[middle[1]]}.{last}"
    return f"{TOP[head]}.{last}" if head in TOP and not middle else name


def _dequantize(raw: "np.ndarray[Any, Any]", kind: Any) -> torch.Tensor:
    from gguf.quants import dequantize

    try:
        return torch.from_numpy(np.array(dequantize(raw, kind), dtype=np.float32))
    except NotImplementedError as e:
        raise UserError(f"GGUF tensors of type {kind.name} are not supported.") from e


def _unpermute(ref: TensorRef, heads: int) -> torch.Tensor:
    """Rows of each head from the order 0, D/2, 1, D/2 + 1, … back to 0, 1, 2, …"""
    return ref.read().reshape(heads, -1, 2, *ref.shape[1:]).transpose(1, 2).reshape(ref.shape)


def _config(meta: dict[str, Any], tensors: dict[str, TensorRef]) -> dict[str, Any]:
    """config.json's words for the metadata. Takes `rope_freqs` out of `tensors` and puts Q and K in order."""
    kind = meta.get("general.architecture", "")
    supported = ", ".join(ARCHITECTURES)
    require(kind in ARCHITECTURES, f"GGUF architecture {kind!r} is not supported; supported: {supported}.")
    require(meta.get("split.count", 1) < 2, "this GGUF is one of several parts; merge them into one file first.")
    model = {key.removeprefix(f"{kind}."): value for key, value in meta.items() if key.startswith(f"{kind}.")}
    heads = model["attention.head_count"]
    kv_heads = model.get("attention.head_count_kv", heads)
    head_dim = model.get("attention.key_length", model["embedding_length"] // heads)
    sizes = {model.get(key, head_dim) for key in ("rope.dimension_count", "attention.value_length")}
    require(sizes == {head_dim}, "heads rotated only in part, or with values of another size, are not supported.")
    for name, ref in tensors.items() if kind == "llama" else ():
        if ".q_proj." in name or ".k_proj." in name:
            tensors[name] = ref._replace(read=partial(_unpermute, ref, heads if ".q_proj." in name else kv_heads))

    scaling = model.get("rope.scaling.type", "none")
    rope: dict[str, Any] = {"rope_theta": model.get("rope.freq_base", 10_000.0)}
    if scaling != "none":
        rope |= {"rope_type": scaling, "factor": model.get("rope.scaling.factor")}
        rope["original_max_position_embeddings"] = model.get("rope.scaling.original_context_length")
    odd = {"rope.scaling.attn_factor", "rope.scale_linear"} & model.keys()
    require(not odd, f"GGUF files with {', '.join(odd)} are not supported.")
    if freqs := tensors.pop("rope_freqs.weight", None):  # Llama 3.x: its scaling, already worked out
        require(freqs.shape == (head_dim // 2,), f"rope_freqs.weight has shape {freqs.shape}, not ({head_dim // 2},).")
        rope |= {"rope_type": "default", "freq_factors": tuple(freqs.read().tolist())}
    eps = np.float32(model["attention.layer_norm_rms_epsilon"])
    stops = [meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": tensors["model.embed_tokens.weight"].shape[0],
        "hidden_size": model["embedding_length"],
        "intermediate_size": model["feed_forward_length"],
        "num_hidden_layers": model["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": float(str(eps)),  # 1e-05, not 9.999999747378752e-06
        "max_position_embeddings": model["context_length"],
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in tensors,
        "rope_parameters": rope,
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [token for token in stops if token is not None],
        # The precision the weights were quantised from is not recorded; only unquantised files say theirs.
        "dtype": {0: "float32", 1: "float16"}.get(meta.get("general.file_type", -1), "bfloat16"),
    }
