"""Files on disk: shards, what is refused and with which words, what a name means."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanopd.config import UserError
from nanopd.models.loader import load_config, load_model, resolve_model
from tests.models.conftest import assert_same_logits, logits_of, make_model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    make_model("Llama").save_pretrained(path)
    return path


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "model")


def edit(file, **changes):
    raw = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))


def retensor(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize("with_index", [True, False])
def test_shards_with_and_without_an_index(with_index, tmp_path, ids):
    theirs = make_model("Qwen2")
    theirs.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    if not with_index:
        (tmp_path / "model.safetensors.index.json").unlink()
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
    assert_same_logits(logits_of(load_model(tmp_path, "float32", "cpu", 64), ids), expected)


def test_what_a_checkpoint_may_hold_besides(copy, ids):
    """Rotary tables of old checkpoints are ignored; a head beside tied embeddings is the head."""
    before = logits_of(load_model(copy, "float32", "cpu", 64), ids)
    retensor(copy, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}))
    edit(copy / "config.json", tie_word_embeddings=True)
    assert torch.equal(logits_of(load_model(copy, "float32", "cpu", 64), ids), before)


NORM, Q = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
CONFIG = {
    "unknown architecture": (
        {"architectures": ["MambaForCausalLM"]},
        "'MambaForCausalLM' is not supported.*Llama.*Qwen3",
    ),
    "no architecture": ({"architectures": ...}, "architecture 'none' is not supported"),
    "not a language model": ({"architectures": ["LlamaForSequenceClassification"]}, "is not supported; supported"),
    "unknown rope": (
        {"rope_parameters": {"rope_type": "longrope", "factor": 2}},
        "RoPE .*'longrope'.*not supported.*llama3, yarn",
    ),
    "rope theta zero": ({"rope_parameters": {"rope_theta": 0}}, r"Expected `float` > 0.0 - at `\$.rope_theta`"),
    "rope theta text": ({"rope_theta": "big", "rope_parameters": ...}, r"got `str` - at `\$.rope_theta`"),
    "rope per layer": ({"rope_parameters": {"full_attention": {}}}, "RoPE .*full_attention.*not supported"),
    "part of each head": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor': 0.5.*of whole heads"),
    "part of each head, inside": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "of whole heads"),
    "activation": ({"hidden_act": "gelu"}, r"'gelu' - at `\$.hidden_act`"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "quantised checkpoints are not supported"),
    "dtype": ({"dtype": "float64"}, r"'float64' - at `\$.dtype`"),
    "size missing": ({"hidden_size": ...}, "missing required field `hidden_size`"),
    "size negative": ({"vocab_size": -3}, r"Expected `int` >= 1 - at `\$.vocab_size`"),
    "size true": ({"num_hidden_layers": True}, "num_hidden_layers is True"),
    "size a text": ({"intermediate_size": "4"}, r"Expected `int`, got `str` - at `\$.intermediate_size`"),
    "heads a text": ({"num_attention_heads": "4"}, "unsupported operand"),
    "layers by the million": ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be 1 to 1000"),
    "size enormous": ({"intermediate_size": 10**15}, r"Expected `int` <= 2147483647 - at `\$.intermediate_size`"),
    "heads do not divide": ({"num_key_value_heads": 3}, "attention heads must divide into key/value heads"),
    "odd heads": ({"head_dim": 11}, "head_dim is 11"),
    "eps a text": ({"rms_norm_eps": "small"}, r"got `str` - at `\$.rms_norm_eps`"),
    "eos a text": ({"eos_token_id": "</s>"}, r"got `str` - at `\$.eos_token_ids"),
    "architectures a number": ({"architectures": 7}, "'int' object is not subscriptable"),
    "window in some layers": ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}, "in some of the"),
}


@pytest.mark.parametrize("name", CONFIG)
def test_configs_that_are_refused(name, copy):
    changes, words = CONFIG[name]
    edit(copy / "config.json", **changes)
    for load in (load_config, lambda path: load_model(path, "auto", "cpu", 64)):
        with pytest.raises(UserError, match=words) as error:
            load(copy)
        assert str(error.value).startswith(f"{copy}/config.json: ")


ROPE = {
    "rope without a factor": ({"rope_type": "yarn"}, "'factor'"),
    "rope factor of text": ({"rope_type": "linear", "factor": "2"}, "str"),
    "rope factor zero": ({"rope_type": "linear", "factor": 0}, "frequencies are no numbers"),
    "rope factor endless": ({"rope_type": "yarn", "factor": 1e308 * 10}, "not valid JSON|no valid JSON"),
    "rope theta one": ({"rope_type": "yarn", "factor": 2, "rope_theta": 1}, "division by zero"),
}


@pytest.mark.parametrize("name", ROPE)
def test_scaled_ropes_that_cannot_be_computed(name, copy):
    """transformers computes them, so their parameters are looked at no sooner than there: before weights are read."""
    rope, words = ROPE[name]
    edit(copy / "config.json", rope_parameters={"rope_theta": 100.0} | rope)
    with pytest.raises(UserError, match=words) as error:
        load_model(copy, "auto", "cpu", 64)
    assert str(error.value).startswith(str(copy))


def cut(file, size):
    file.write_bytes(file.read_bytes()[:size])


FILES = {
    "no config": (lambda p: (p / "config.json").unlink(), "config.json: there is no such file"),
    "config cut short": (lambda p: cut(p / "config.json", 40), "config.json is no valid JSON"),
    "config not UTF-8": (lambda p: (p / "config.json").write_bytes(b'{"a": "\xff"}'), "config.json is no valid JSON"),
    "config a list": (lambda p: (p / "config.json").write_text("[]"), "no valid JSON object: Expected `object`"),
    "generation config broken": (
        lambda p: (p / "generation_config.json").write_text("{"),
        "generation_config.json is no valid JSON",
    ),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), r"no model\*\.safetensors files"),
    "only pickled": (
        lambda p: (p / "model.safetensors").rename(p / "pytorch_model.bin"),
        "never opens pickled weights",
    ),
    "header cut short": (lambda p: cut(p / "model.safetensors", 100), "model.safetensors: .*invalid header length"),
    "data cut short": (lambda p: cut(p / "model.safetensors", 90_000), "model.safetensors: .*not fully covered"),
    "empty": (lambda p: cut(p / "model.safetensors", 0), "model.safetensors: .*header too small"),
    "not safetensors": (
        lambda p: (p / "model.safetensors").write_bytes(b"PK" * 999),
        "model.safetensors: .*header too large",
    ),
    "tensor missing": (lambda p: retensor(p, lambda t: t.pop(Q)), f"tensor {Q} is missing"),
    "tensor mis-shaped": (
        lambda p: retensor(p, lambda t: t.update({Q: torch.zeros(48, 47)})),
        "tensor layers.1.self_attn.qkv_proj.weight: Sizes of tensors must match",
    ),
    "tensor with other rows": (
        lambda p: retensor(p, lambda t: t.update({Q: torch.zeros(47, 48)})),
        r"size mismatch for layers.1.self_attn.qkv_proj.weight: .*\[95, 48\].*\[96, 48\]",
    ),
    "vector for a matrix": (
        lambda p: retensor(p, lambda t: t.update({Q: torch.zeros(48)})),
        "tensor layers.1.self_attn.qkv_proj.weight: Tensors must have same number of dimensions",
    ),
    "vector too long": (lambda p: retensor(p, lambda t: t.update({NORM: torch.zeros(49)})), "size mismatch for norm"),
    "tensor of integers": (
        lambda p: retensor(p, lambda t: t.update({NORM: torch.zeros(48, dtype=torch.int8)})),
        "there are integers among its tensors",
    ),
    "tensor too many": (
        lambda p: retensor(p, lambda t: t.update({"model.layers.3.mlp.up_proj.weight": torch.zeros(1)})),
        "no place for 1 of the tensors: model.layers.3.mlp.up_proj.weight",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_refused(name, copy):
    damage, words = FILES[name]
    damage(copy)
    with pytest.raises(UserError, match=words) as error:
        load_model(copy, "auto", "cpu", 64)
    assert str(error.value).startswith(str(copy))


def test_an_index_is_not_followed_out_of_the_directory(copy):
    """What counts is the files that are there."""
    (copy / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors", "b": "/etc/passwd"}}')
    shutil.copy(copy / "model.safetensors", copy / "consolidated.safetensors")
    load_model(copy, "auto", "cpu", 64)


def test_what_a_name_means(saved, tmp_path, monkeypatch):
    monkeypatch.setenv("NANOPD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    shutil.copytree(saved, tmp_path / "cache/models/tiny")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert resolve_model(str(saved)) == saved
    assert resolve_model("tiny") == tmp_path / "cache/models/tiny"
    for name in ("nothing", "here/model", "./a/b", "a/b/c", "some/model.gguf", "owner/model", "x" * 999):
        with pytest.raises(UserError, match="is neither a path nor in the cache, and could not be had from the hub"):
            resolve_model(name)
    for name in ("x" * 5000, "a\0b"):
        with pytest.raises(UserError, match="The name of the model is no path"):
            resolve_model(name)
    (tmp_path / "x.gguf").write_text("")
    with pytest.raises(UserError, match=r"x-0-\d+ cannot be made in .*: cannot mmap an empty file"):
        resolve_model("x.gguf")
