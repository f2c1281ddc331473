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
    "unknown model type": ({"architectures": ..., "model_type": "gpt2"}, "'Gpt2ForCausalLM' is not supported"),
    "not a language model": ({"architectures": ["LlamaForSequenceClassification"]}, "is not supported; supported"),
    "unknown rope": ({"rope_parameters": {"rope_type": "longrope", "factor": 2}}, "RoPE type 'longrope'.*llama3, yarn"),
    "rope without a factor": ({"rope_parameters": {"rope_type": "yarn"}}, "'yarn' needs a factor"),
    "rope factor of text": ({"rope_parameters": {"rope_type": "linear", "factor": "2"}}, "factor of RoPE is '2'"),
    "rope theta one": ({"rope_parameters": {"rope_theta": 1.0}}, "rope_theta of RoPE is 1.0.*above 1"),
    "rope per layer": ({"rope_parameters": {"full_attention": {}}}, "rope_parameters must be one flat object"),
    "part of each head": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; only 1"),
    "activation": ({"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "quantised checkpoints are not supported"),
    "dtype": ({"dtype": "float64"}, "dtype 'float64' is not supported"),
    "size missing": ({"hidden_size": ...}, "hidden_size is missing"),
    "size negative": ({"vocab_size": -3}, "vocab_size is -3; it must be a whole number"),
    "size true": ({"num_hidden_layers": True}, "num_hidden_layers is True"),
    "size a text": ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
    "size enormous": ({"intermediate_size": 10**15}, "intermediate_size is 1000000000000000"),
    "heads do not divide": ({"num_key_value_heads": 3}, "4 attention heads do not divide into 3"),
    "odd heads": ({"head_dim": 11}, "head_dim is 11"),
    "eps a text": ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
    "eos a text": ({"eos_token_id": "</s>"}, "eos_token_id is"),
    "architectures a number": ({"architectures": 7}, "wrong kind"),
    "layer types": (
        {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": ["full_attention"]},
        "layer_types must be 3 times",
    ),
}


@pytest.mark.parametrize("name", CONFIG)
def test_configs_that_are_refused(name, copy):
    changes, words = CONFIG[name]
    edit(copy / "config.json", **changes)
    for load in (load_config, lambda path: load_model(path, "auto", "cpu", 64)):
        with pytest.raises(UserError, match=words) as error:
            load(copy)
        assert str(error.value).startswith(f"{copy}: ")


def cut(file, size):
    file.write_bytes(file.read_bytes()[:size])


FILES = {
    "no config": (lambda p: (p / "config.json").unlink(), "there is no config.json"),
    "config cut short": (lambda p: cut(p / "config.json", 40), "config.json is not valid JSON"),
    "config not UTF-8": (lambda p: (p / "config.json").write_bytes(b'{"a": "\xff"}'), "config.json is not valid JSON"),
    "config a list": (lambda p: (p / "config.json").write_text("[]"), "must hold a JSON object"),
    "generation config broken": (
        lambda p: (p / "generation_config.json").write_text("{"),
        "generation_config.json is not",
    ),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), r"no \.safetensors files\.$"),
    "only pickled": (lambda p: (p / "model.safetensors").rename(p / "pytorch_model.bin"), "only pickled weights"),
    "header cut short": (lambda p: cut(p / "model.safetensors", 100), "model.safetensors is missing, cut short"),
    "data cut short": (lambda p: cut(p / "model.safetensors", 90_000), "model.safetensors is missing, cut short"),
    "empty": (lambda p: cut(p / "model.safetensors", 0), "model.safetensors is missing, cut short"),
    "not safetensors": (lambda p: (p / "model.safetensors").write_bytes(b"PK" * 999), "missing, cut short or no"),
    "tensor missing": (lambda p: retensor(p, lambda t: t.pop(Q)), f"tensor {Q} is missing"),
    "tensor mis-shaped": (
        lambda p: retensor(p, lambda t: t.update({Q: torch.zeros(48, 47)})),
        rf"tensor {Q} has shape \[48, 47\]; the config asks for \[48, 48\]",
    ),
    "vector for a matrix": (lambda p: retensor(p, lambda t: t.update({Q: torch.zeros(48)})), r"has shape \[48\]; the"),
    "tensor of integers": (
        lambda p: retensor(p, lambda t: t.update({NORM: torch.zeros(48, dtype=torch.int8)})),
        f"tensor {NORM} is stored as I8",
    ),
    "tensor too many": (
        lambda p: retensor(p, lambda t: t.update({"model.layers.3.mlp.up_proj.weight": torch.zeros(1)})),
        "no place for 1 of the tensors: model.layers.3.mlp.up_proj.weight",
    ),
    "index to another directory": (
        lambda p: (p / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}'),
        "names files outside",
    ),
    "index to an absolute path": (
        lambda p: (p / "model.safetensors.index.json").write_text('{"weight_map": {"a": "/etc/passwd"}}'),
        "names files outside",
    ),
    "index to nothing": (
        lambda p: (p / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}'),
        "b.safetensors is missing",
    ),
    "index of numbers": (
        lambda p: (p / "model.safetensors.index.json").write_text('{"weight_map": {"a": 1}}'),
        "wrong kind",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_refused(name, copy):
    damage, words = FILES[name]
    damage(copy)
    with pytest.raises(UserError, match=words) as error:
        load_model(copy, "auto", "cpu", 64)
    assert str(error.value).startswith(f"{copy}: ")


def test_dtype_out_of_range(saved):
    with pytest.raises(UserError, match="dtype is 'int4'; it must be auto, float32"):
        load_model(saved, "int4", "cpu", 64)


def test_what_a_name_means(saved, tmp_path, monkeypatch):
    monkeypatch.setenv("NANOPD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    shutil.copytree(saved, tmp_path / "cache/models/tiny")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "note.txt").write_text("")
    (tmp_path / "x.gguf").write_text("")
    (tmp_path / "here").mkdir()
    assert resolve_model(str(saved)) == saved
    assert resolve_model("x.gguf").name == "x.gguf"
    assert resolve_model("tiny") == tmp_path / "cache/models/tiny"
    for name, words in {
        "note.txt": "neither a .gguf file nor a directory",
        "nothing": "no file or directory nothing",
        "here/model": "no file or directory here/model",  # `here` is a directory: a path with a slip in it
        "./a/b": "no file or directory",
        "a/b/c": "no file or directory",
        "some/model.gguf": "no file or directory",
        "owner/model": r"owner/model is not a directory here and could not be had from the hub.*Go online",
    }.items():
        with pytest.raises(UserError, match=words):
            resolve_model(name)
