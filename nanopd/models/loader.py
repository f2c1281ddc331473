"""From a name to a directory, from a directory to a filled `Decoder`.

A checkpoint is a dictionary of tensors that still lie in their safetensors files: these are mapped into memory, and a
page is read when it is touched. Each tensor is copied to its place on the device, so there is never a second copy of
the weights.

Only safetensors (and GGUF, once, by `gguf.py`) are read. Both are plain data: nothing is unpickled, and no code that
comes with a model runs. Whatever is wrong with the files raises UserError, nothing else.
"""

import os
from pathlib import Path

import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from nanopd.config import require
from nanopd.models import default
from nanopd.models.config import ModelConfig, blame, read_json
from nanopd.models.decoder import Decoder

HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model"]
# Our fused weights and the rows of the checkpoint they are made of, in order.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def resolve_model(name: str | None) -> Path:
    """The model's directory for what `--model` was given; None is the default model. May download or convert.

    Tried in this order: a path, the name of a model in our cache (`default.list_models`), a hub id ("owner/model").
    """
    if name is None:
        return default.fetch_default_model()
    require(len(name) < 4096 and "\0" not in name, "The name of the model is no path and no hub id.")
    path = Path(os.path.expanduser(name))
    if path.suffix == ".gguf" and path.is_file():
        key = f"{path.stem}-{path.stat().st_size}-{path.stat().st_mtime_ns}"
        return default.keep(key, lambda _: path.resolve())
    if os.path.exists(path):  # path.exists() trips over a name too long for a file
        return path
    if cached := dict(default.list_models()).get(name):
        return cached
    from huggingface_hub import snapshot_download

    with blame(f"{name} is neither a path nor in the cache, and could not be had from the hub"):
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=["consolidated*", "*/*"]))


def load_config(path: Path) -> ModelConfig:
    """The model's config from its directory: config.json and, if there is one, generation_config.json."""
    file = path / "config.json"
    with blame(str(file)):
        require(file.is_file(), "there is no such file; give a Hugging Face model directory or a .gguf file.")
        return ModelConfig.from_hf(read_json(file), read_json(path / "generation_config.json", optional=True))


def load_model(path: Path, dtype: str, device: str | torch.device, max_model_len: int) -> Decoder:
    """The decoder with its weights, on `device`, for positions below `max_model_len`.

    `dtype` is auto (what the checkpoint says), float32, bfloat16 or float16.
    """
    config = load_config(path)
    with blame(str(path)):
        shards = sorted(path.glob("model*.safetensors"))  # others hold other models, or the same once more
        require(bool(shards), "there are no model*.safetensors files; nanopd never opens pickled weights (.bin, .pt).")
        tensors: dict[str, torch.Tensor] = {}
        for shard in shards:
            with blame(shard.name):  # cut short, for example
                tensors |= load_file(shard)
        require(all(t.is_floating_point() for t in tensors.values()), "there are integers among its tensors.")
        # A head in the file is the model's head, whatever the config says about tying.
        config = replace(config, tie_word_embeddings=config.tie_word_embeddings and "lm_head.weight" not in tensors)
        with torch.device("meta"):  # shapes only, no memory
            model = Decoder(config, max_model_len)
        state, to = {}, {"device": device, "dtype": getattr(torch, config.dtype if dtype == "auto" else dtype)}
        for name, _ in model.named_parameters():
            module = name.split(".")[-2]
            prefix = "" if module == "lm_head" else "model."
            parts = [prefix + name.replace(module, part) for part in FUSED.get(module, [module])]
            missing = [part for part in parts if part not in tensors]
            require(not missing, f"tensor {', '.join(missing)} is missing.")
            with blame(f"tensor {name}"):
                state[name] = torch.cat([tensors.pop(part) for part in parts]).to(**to)
        extra = [name for name in tensors if not name.endswith("rotary_emb.inv_freq")]
        require(not extra, f"this architecture has no place for {len(extra)} of the tensors: {', '.join(extra[:4])}.")
        if config.tie_word_embeddings:
            state["lm_head.weight"] = state["embed_tokens.weight"]
        model.load_state_dict(state, assign=True)  # raises if a shape is wrong
        return model.to(**to)
