"""GGUF: tiny files written with the gguf package's own writer, in llama.cpp's conventions, and damaged ones."""

import random

import gguf
import pytest
import torch
from safetensors.torch import load_file

from nanopd.config import UserError
from nanopd.models.default import list_models
from nanopd.models.loader import load_config, load_model, resolve_model
from nanopd.models.tokenizer import load_tokenizer
from tests.models.conftest import assert_same_logits, logits_of, make_model

TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output"}
LAYER |= {f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"} | {f"self_attn.{x}_norm": f"attn_{x}_norm" for x in "qk"}
LAYER |= {f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")}
NAMES = TOP | LAYER
# 96 tokens, as many as the models have: bytes, one merge, one word for the end.
TOKENS = ["<s>", "<unk>", "</s>", "he", *(chr(code) for code in range(33, 125))]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Converted files go here."""
    monkeypatch.setenv("NANOPD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache/models"


def llama_cpp_name(name: str) -> str:
    layer, name = (name.split(".")[2], name.split(".", 3)[3]) if ".layers." in name else (None, name)
    stem, kind = name.rsplit(".", 1)
    return f"{NAMES[stem]}.{kind}" if layer is None else f"blk.{layer}.{NAMES[stem]}.{kind}"


def pairs_next_to_each_other(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of the rows of Q and K: row i of the first half, then row i of the second half."""
    per_head = tensor.view(heads, -1, *tensor.shape[1:])
    half = per_head.shape[1] // 2
    rows = [row for i in range(half) for row in (i, half + i)]
    return per_head[:, rows].reshape(tensor.shape)


def write(model, path, meta=None, extra=None, quantise=None):
    config, kind = model.config, {"mistral": "llama"}.get(model.config.model_type, model.config.model_type)
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(model.model.layers[0].self_attn.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if "add_file_type" not in (meta or {}):
        writer.add_file_type(0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * 93)
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    for add, value in (meta or {}).items():
        getattr(writer, add)(value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if kind == "llama" and (".q_proj" in name or ".k_proj" in name):
            heads = config.num_attention_heads if ".q_proj" in name else config.num_key_value_heads
            tensor = pairs_next_to_each_other(tensor, heads)
        data = tensor.contiguous().numpy()
        if quantise and tensor.ndim == 2:
            writer.add_tensor(llama_cpp_name(name), gguf.quants.quantize(data, quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(llama_cpp_name(name), data)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


FILES = {
    "llama": ("Llama", {}, {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}, {"add_rope_dimension_count": 12}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}, {"add_name": "mistral"}),
    "qwen2": ("Qwen2", {}, {}),
    "qwen3 tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}, {}),
}


@pytest.mark.parametrize("name", FILES)
def test_logits_are_those_of_the_model_the_file_was_made_from(name, tmp_path, ids):
    kind, options, meta = FILES[name]
    theirs = make_model(kind, **options)
    path = resolve_model(str(write(theirs, tmp_path / "m.gguf", meta | {"add_eot_token_id": 3})))
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
    assert_same_logits(logits_of(load_model(path, "auto", "cpu", 64), ids), expected)
    assert load_config(path).eos_token_ids == (2, 3)
    weights = load_file(path / "model.safetensors")
    assert all(torch.equal(weights[name], tensor) for name, tensor in theirs.state_dict().items() if name in weights)
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("hehh</s>") == [3, TOKENS.index("h"), TOKENS.index("h"), 2]
    assert tokenizer.eos_token_ids == (2,)


def test_a_file_is_converted_once_and_again_when_it_has_changed(tmp_path, cache, capsys):
    file = write(make_model("Llama"), tmp_path / "m.gguf")
    first = resolve_model(str(file))
    assert "m-" in capsys.readouterr().err
    assert resolve_model(str(file)) == first == cache / first.name
    assert capsys.readouterr().err == ""
    assert list_models() == [(first.name, first)]
    assert resolve_model(first.name) == first
    write(make_model("Llama", num_hidden_layers=1), file)
    assert load_config(resolve_model(str(file))).num_layers == 1
    assert len(list_models()) == 2


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_quantised_tensors_are_what_the_gguf_package_reads_in_bfloat16(kind, tmp_path):
    kind = gguf.GGMLQuantizationType[kind]
    model = make_model("Qwen2", hidden_size=64, intermediate_size=96)
    path = write(model, tmp_path / "m.gguf", {"add_file_type": 7}, quantise=kind)
    loaded = load_model(resolve_model(str(path)), "auto", "cpu", 64)
    for name, mine in (
        ("embed_tokens", loaded.embed_tokens),
        ("layers.1.mlp.down_proj", loaded.layers[1].mlp.down_proj),
    ):
        data = model.model.get_parameter(f"{name}.weight").detach().numpy()
        expected = gguf.quants.dequantize(gguf.quants.quantize(data, kind), kind)
        assert torch.equal(mine.weight, torch.from_numpy(expected.astype("float32")).bfloat16())


def _rewrite(path, after, old, new):
    data = path.read_bytes()
    at = data.index(old, data.index(after))
    path.write_bytes(data[:at] + new + data[at + len(old) :])


REFUSED = {
    "RoPE in divisors, as Llama 3 has it": ({}, {"rope_freqs.weight": torch.ones(6)}, r"more tensors .*rope_freqs"),
    "attention sinks": ({}, {"blk.0.attn_sinks.weight": torch.zeros(4)}, "more tensors than the model's"),
    "yarn": ({"add_rope_scaling_type": gguf.RopeScalingType.YARN}, {}, r"'rope.scaling.type': 'yarn'"),
    "linear": ({"add_rope_scaling_factor": 4.0}, {}, r"'rope.scaling.factor': 4.0"),
    "attention factor": ({"add_rope_scaling_attn_factors": 1.5}, {}, r"'rope.scaling.attn_factor': 1.5"),
    "heads rotated in part": ({"add_rope_dimension_count": 6}, {}, r"'rope.dimension_count': 6"),
    "values of another size": ({"add_value_length": 6}, {}, r"'attention.value_length': 6"),
    "sliding window": ({"add_sliding_window": 9}, {}, r"'attention.sliding_window': 9"),
    "experts": ({"add_expert_count": 8}, {}, r"'expert_count': 8"),
    "layers that are not there": ({"add_block_count": 4}, {}, "or only a part"),
    "layers by the thousand": ({"add_block_count": 4000}, {}, "num_hidden_layers is 4000"),
}


@pytest.mark.parametrize("kind", ["Llama", "Qwen2"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_transformers_would_pass_over_is_refused(name, kind, tmp_path, cache):
    meta, extra, words = REFUSED[name]
    path = write(make_model(kind), tmp_path / "m.gguf", meta, extra)
    with pytest.raises(UserError, match=rf"m-\d+-\d+ cannot be made in .*{words}"):
        resolve_model(str(path))
    assert list_models() == []


def test_biases_where_the_architecture_has_none_are_refused(tmp_path):
    path = write(make_model("Llama", attention_bias=True), tmp_path / "m.gguf")
    with pytest.raises(UserError, match="more tensors than the model's"):
        resolve_model(str(path))


def test_an_unknown_architecture_is_refused(tmp_path):
    path = write(make_model("Qwen2"), tmp_path / "m.gguf")
    data = path.read_bytes()
    at = data.index(b"qwen2", data.index(b"general.architecture"))
    path.write_bytes(data[:at] + b"qwen9" + data[at + 5 :])
    with pytest.raises(UserError, match=r"GGUF architecture 'qwen9' is not supported; supported: \['llama', 'qwen2'"):
        resolve_model(str(path))


def test_a_file_cut_short_anywhere_is_a_user_error(tmp_path):
    data = write(make_model("Llama"), tmp_path / "m.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [0, 3, 4, 10, *range(24, 4000, 397), *range(4000, len(data) - 32, 60_011), len(data) - 33]:
        path.write_bytes(data[:size])
        with pytest.raises(UserError):
            resolve_model(str(path))


def test_a_file_with_random_damage_is_read_or_refused(tmp_path):
    """Nothing but UserError comes out, and no absurd amount of memory is asked for."""
    data = write(make_model("Llama", num_hidden_layers=1), tmp_path / "m.gguf").read_bytes()
    path, dice = tmp_path / "damaged.gguf", random.Random(5)
    refused = 0
    for _ in range(150):
        damaged = bytearray(data)
        for _ in range(dice.randint(1, 3)):
            damaged[dice.randrange(2500)] = dice.choice([0, 1, 0x7F, 0xFF, dice.randrange(256)])
        path.write_bytes(damaged)
        try:
            load_model(resolve_model(str(path)), "auto", "cpu", 64)
        except UserError:
            refused += 1
    assert refused > 50
