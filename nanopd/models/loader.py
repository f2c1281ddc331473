"""From a name to files, from files to a filled `Decoder`.

A checkpoint is a dictionary of `TensorRef`s, name -> shape and a way to read it, whether it comes from safetensors or
from GGUF (`gguf.py`). First every name and shape is compared with what the model needs, then the tensors are copied
one by one to their place: there is never a second copy of the weights, and a wrong file is refused before anything
large is allocated.

Only safetensors and GGUF are read. Both are plain data: nothing is unpickled, and no code that comes with a model runs.
Whatever is wrong with the files raises UserError, nothing else.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nanopd.config import UserError
from nanopd.models import default, gguf
from nanopd.models.config import DTYPES, ModelConfig, read_json, require
from nanopd.models.decoder import Decoder
from nanopd.models.gguf import TensorRef

HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model"]
# Our fused weights and the rows of the checkpoint they are made of, in order.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def resolve_model(name: str | None) -> Path:
    """A directory or a .gguf file for what `--model` was given; None is the default model. May download.

    Tried in this order: a path, the name of a model in our cache (`default.list_models`), a hub id ("owner/model").
    """
    if name is None:
        return default.fetch_default_model()
    path = Path(os.path.expanduser(name))
    require(len(name) < 4096 and "\0" not in name, "The name of the model is no path and no hub id.")
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    require(not path.exists(), f"{name} is neither a .gguf file nor a directory with a config.json.")
    if cached := dict(default.list_models()).get(name):
        return cached
    # "owner/model" is a hub id, unless `owner` is a directory here: then it is a path with a slip in it.
    is_id = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(?<!\.gguf)", name) and not path.parent.is_dir()
    require(
        bool(is_id), f"There is no file or directory {name}, nor a cached model of that name (`nanopd model list`)."
    )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=["consolidated*", "*/*"]))
    except Exception as e:  # no network, no such repository, gated, disk full: many kinds, from several libraries
        reason = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise UserError(
            f"{name} is not a directory here and could not be had from the hub ({reason}). Go online and, for a gated "
            "model, log in (`hf auth login`); or give the path of a model directory or a .gguf file."
        ) from e


def load_config(path: Path) -> ModelConfig:
    """The model's config from a directory (config.json, generation_config.json) or a .gguf file."""
    return _open(path)[0]


def load_model(path: Path, dtype: str, device: str | torch.device, max_model_len: int) -> Decoder:
    """The decoder with its weights, on `device`, for positions below `max_model_len`.

    `dtype` is auto (what the checkpoint says), float32, bfloat16 or float16.
    """
    config, tensors = _open(path, weights=True)
    dtype = config.dtype if dtype == "auto" else dtype
    require(dtype in DTYPES, f"dtype is {dtype!r}; it must be auto, {', '.join(DTYPES)}.")
    # A head in the file is the model's head, whatever the config says about tying.
    config = replace(config, tie_word_embeddings=config.tie_word_embeddings and "lm_head.weight" not in tensors)
    with torch.device("meta"):  # shapes only, no memory
        model = Decoder(config, max_model_len)
    places = list(_places(model))
    state: dict[str, torch.Tensor] = {}
    try:
        _check(tensors, {name: shape for name, _, _, shape in places})
        for name, parameter, start, shape in places:
            if parameter not in state:
                whole = model.get_parameter(parameter).shape
                state[parameter] = torch.empty(whole, dtype=getattr(torch, dtype), device=device)
            state[parameter][start : start + shape[0]].copy_(tensors[name].read())
    except UserError as e:
        raise UserError(f"{path}: {e}") from None
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.tie()
    return model.to(device=device, dtype=getattr(torch, dtype))


def _open(path: Path, weights: bool = False) -> tuple[ModelConfig, dict[str, TensorRef]]:
    """What is in there, not read yet. Errors name the path."""
    try:
        if path.suffix == ".gguf" and path.is_file():
            raw, tensors = gguf.read(path)
            return ModelConfig.from_hf(raw), tensors
        found = (path / "config.json").is_file()
        require(found, "there is no config.json; give a Hugging Face model directory or a .gguf file.")
        ends = read_json(path / "generation_config.json", optional=True)
        config = ModelConfig.from_hf(read_json(path / "config.json"), ends)
        return config, _open_safetensors(path) if weights else {}
    except UserError as e:
        raise UserError(f"{path}: {e}") from e.__cause__
    except (TypeError, LookupError, AttributeError) as e:
        raise UserError(f"{path}: a JSON file holds a value of the wrong kind ({e}).") from e


def _places(model: Decoder) -> Iterator[tuple[str, str, int, tuple[int, ...]]]:
    """(name in the checkpoint, parameter, first row, shape) for every tensor the model is made of."""
    for parameter, value in model.named_parameters():
        module, _, kind = parameter.rpartition(".")
        prefix, _, last = module.rpartition(".")
        start = 0
        sizes = getattr(model.get_submodule(module), "out_sizes", (value.shape[0],))
        for part, size in zip(FUSED.get(last, (last,)), sizes):
            name = ".".join(filter(None, ("" if last == "lm_head" else "model", prefix, part, kind)))
            yield name, parameter, start, (size, *value.shape[1:])
            start += size


def _check(tensors: dict[str, TensorRef], needed: dict[str, tuple[int, ...]]) -> None:
    for name, shape in needed.items():
        require(name in tensors, f"tensor {name} is missing.")
        found = tensors[name].shape
        require(found == shape, f"tensor {name} has shape {list(found)}; the config asks for {list(shape)}.")
    extra = [name for name in tensors if name not in needed and not name.endswith("rotary_emb.inv_freq")]
    require(not extra, f"this architecture has no place for {len(extra)} of the tensors: {', '.join(extra[:4])}.")


def _open_safetensors(path: Path) -> dict[str, TensorRef]:
    """Every tensor of a directory: the shards its index names, else model.safetensors, else all *.safetensors."""
    from safetensors import SafetensorError, safe_open

    index, shards = path / "model.safetensors.index.json", sorted(file.name for file in path.glob("*.safetensors"))
    if index.is_file():
        shards = sorted(set(read_json(index).get("weight_map", {}).values()))
        plain = all(Path(name).name == name for name in shards)
        require(plain, f"{index.name} names files outside the model's directory.")
    elif "model.safetensors" in shards:
        shards = ["model.safetensors"]
    pickled = " There are only pickled weights, which nanopd never opens." if any(path.glob("*.bin")) else ""
    require(bool(shards), f"there are no .safetensors files.{pickled}")
    tensors: dict[str, TensorRef] = {}
    for shard in shards:
        try:
            file: Any = safe_open(path / shard, framework="pt")
            for name in file.keys():  # noqa: SIM118 (not a dict)
                kind = file.get_slice(name).get_dtype()
                require(kind in ("F64", "F32", "F16", "BF16"), f"tensor {name} is stored as {kind}, not as floats.")
                tensors[name] = TensorRef(tuple(file.get_slice(name).get_shape()), partial(file.get_tensor, name))
        except (SafetensorError, OSError) as e:
            raise UserError(f"{shard} is missing, cut short or no safetensors file ({e}).") from e
    return tensors
