"""Converts a .gguf file (llama.cpp's format), once, to a directory like those from Hugging Face, in our cache.

transformers reads the file: names, de-quantised weights, the order of the rows of Q and K (llama.cpp rotates neighbours,
we rotate halves), tokenizer. But it passes over what it does not know without a word: that is refused here.
"""

from pathlib import Path

import torch
from gguf import GGUFReader
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.integrations import GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from nanopd.config import require
from nanopd.models.config import ModelConfig

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def convert(file: Path, directory: Path) -> Path:
    """Makes `directory` and returns it. Raises UserError for a model we cannot run, anything for a damaged file."""
    reader = GGUFReader(file)
    kind = reader.fields["general.architecture"].contents()
    require(kind in ARCHITECTURES, f"GGUF architecture {kind!r} is not supported; supported: {[*ARCHITECTURES]}.")
    model = {n.removeprefix(f"{kind}."): f.contents() for n, f in reader.fields.items() if n.startswith(f"{kind}.")}
    tensors = {tensor.name: tensor.shape for tensor in reader.tensors}
    head_dim = int(tensors["blk.0.attn_k.weight"][1]) // model["attention.head_count_kv"]
    one_size = ("rope.dimension_count", "attention.key_length", "attention.value_length")
    known = GGUF_CONFIG_MAPPING[kind]
    odd = {k: v for k, v in model.items() if (v != head_dim if k in one_size else k not in known)}
    require(not odd, f"GGUF files with {odd} are not supported.")
    file_type = reader.fields.get("general.file_type")
    stops = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot")]
    raw = {known[key]: value for key, value in model.items() if known.get(key)} | {
        "model_type": kind,
        "architectures": [ARCHITECTURES[kind]],
        "vocab_size": int(tensors["token_embd.weight"][1]),
        "head_dim": head_dim,
        "tie_word_embeddings": "output.weight" not in tensors,
        "eos_token_id": [reader.fields[name].contents() for name in stops if name in reader.fields],
        # The precision the weights were quantised from is not recorded; only unquantised files say theirs.
        "dtype": {0: "float32", 1: "float16"}.get(file_type and file_type.contents(), "bfloat16"),
    }
    ModelConfig.from_hf(raw)  # raises if the sizes make no sense
    config = AutoConfig.for_model(**raw)
    with torch.device("meta"):  # transformers takes the names of the tensors from a model
        empty = AutoModelForCausalLM.from_config(config)
    weights = load_gguf_checkpoint(file, return_tensors=True, model_to_load=empty, torch_dtype=config.dtype)["tensors"]
    exactly = weights.keys() == dict(empty.named_parameters()).keys() and len(weights) == len(tensors)
    require(exactly, "GGUF files with more tensors than the model's (rope_freqs …), or only a part, are not supported.")
    config.save_pretrained(directory)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(directory)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
