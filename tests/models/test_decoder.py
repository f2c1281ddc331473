"""The decoder against transformers: every architecture and every RoPE, in float32, logit by logit."""

import json
from functools import partial

import msgspec
import pytest
import torch

from nanopd.config import UserError
from nanopd.models.config import ModelConfig
from nanopd.models.decoder import Linear, pack, rope_frequencies
from nanopd.models.loader import load_config, load_model
from tests.models.conftest import assert_same_logits, logits_of, make_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}

MODELS = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, one head group, wide heads": ("Llama", {"num_key_value_heads": 1, "head_dim": 32}),
    "llama, no groups": ("Llama", {"num_key_value_heads": 4}),
    "llama linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "llama llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama llama3 tied": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral windowed": ("Mistral", {"sliding_window": 7, "head_dim": 16}),
    "mistral yarn": (
        "Mistral",
        {"sliding_window": 7, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
    ),
    "qwen2": ("Qwen2", {}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 window switched off": ("Qwen2", {"sliding_window": 5, "max_window_layers": 1}),
    "qwen2 yarn, not truncated": (
        "Qwen2",
        {"rope_parameters": YARN | {"truncate": False, "original_max_position_embeddings": 48}},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 tied": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3 with biases": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3 yarn": (
        "Qwen3",
        {"head_dim": 16, "rope_parameters": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3}},
    ),
    "qwen3 linear": (
        "Qwen3",
        {"head_dim": 16, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name, tmp_path, ids):
    kind, options = MODELS[name]
    theirs = make_model(kind, **options)
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path, "float32", "cpu", max_model_len=64)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
    assert_same_logits(logits_of(ours, ids), expected)


def test_bfloat16_is_close_and_auto_takes_the_dtype_of_the_checkpoint(tmp_path, ids):
    theirs = make_model("Qwen3", head_dim=16).bfloat16()
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path, "auto", "cpu", max_model_len=64)
    assert {p.dtype for p in ours.parameters()} == {ours.cos.dtype} == {torch.bfloat16}
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].float()
    assert (logits_of(ours, ids) - expected).abs().max() < 0.05 * expected.abs().max()


def test_the_way_tokens_are_ordered_in_the_flat_batch_does_not_matter(tmp_path, ids):
    make_model("Llama").save_pretrained(tmp_path)
    model = load_model(tmp_path, "float32", "cpu", max_model_len=64)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(len(ids))

    def attend(layer, query, key, value):  # the causal mask follows from positions, not from the order
        seen = positions[order][:, None] >= positions[order][None]
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(
            0, 1
        )

    hidden = model(torch.tensor(ids)[order], positions[order], attend)
    assert_same_logits(model.compute_logits(hidden), logits_of(model, ids)[order])


def test_tied_weights_are_one_parameter(tmp_path):
    make_model("Llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    model = load_model(tmp_path, "float32", "cpu", max_model_len=64)
    assert model.lm_head.weight.data_ptr() == model.embed_tokens.weight.data_ptr()
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.skipif("fbgemm" not in torch.backends.quantized.supported_engines, reason="packing is for x86")
@pytest.mark.parametrize("name", ["llama tied", "llama with biases", "qwen2", "qwen3"])
def test_packed_weights_are_the_same_numbers_and_there_is_no_other_copy(name, tmp_path, ids):
    kind, options = MODELS[name]
    make_model(kind, **options).bfloat16().save_pretrained(tmp_path)
    model = load_model(tmp_path, "float32", "cpu", max_model_len=64)
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    eyes = [torch.eye(linear.in_features) for linear in linears]
    weights = [linear(eye) for linear, eye in zip(linears, eyes)]
    rows = range(0, 60, 7)
    plain, plain_rows = logits_of(model, ids), [logits_of(model, ids[i : i + 1]) for i in rows]
    model.apply(partial(pack, native=False))
    for linear, eye, weight in zip(linears, eyes, weights):
        torch.testing.assert_close(linear(eye), weight, rtol=0, atol=2**-25)
    names = {name for name, parameter in model.named_parameters() if parameter.dim() == 2}
    assert names == {"embed_tokens.weight"}, "which is read row by row"
    assert_same_logits(logits_of(model, ids), plain)
    for i, expected in zip(rows, plain_rows):
        assert_same_logits(logits_of(model, ids[i : i + 1]), expected)


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this processor does not know bfloat16")
def test_bfloat16_weights_in_the_tiles_of_onednn(tmp_path):
    """The same products, with and without a bias, rounded to bfloat16 at the end; W is not kept a second time."""
    make_model("Qwen2").bfloat16().save_pretrained(tmp_path)
    model = load_model(tmp_path, "bfloat16", "cpu", max_model_len=64)
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    inputs = [torch.randn(rows, linear.in_features).bfloat16() for linear in linears for rows in (1, 9)]
    plain = [linear(x) for linear, x in zip([linear for linear in linears for _ in range(2)], inputs)]
    model.apply(partial(pack, native=True))
    packed = [linear(x) for linear, x in zip([linear for linear in linears for _ in range(2)], inputs)]
    assert any(linear.bias is not None for linear in linears)
    for got, expected in zip(packed, plain):
        torch.testing.assert_close(got, expected, rtol=2**-7, atol=2**-7)
    assert {name for name, parameter in model.named_parameters() if parameter.dim() == 2} == {"embed_tokens.weight"}


@pytest.mark.parametrize("number", [1 + 2**-11, 65536.0, float("nan"), float("inf")])
def test_a_matrix_that_float16_is_too_coarse_for_stays_as_it_is(number):
    linear = Linear(5, 3, bias=False).requires_grad_(False)
    linear.weight.fill_(0.5)[1, 2] = number
    before = linear.weight.clone()
    pack(linear, native=False)
    assert linear.packed is None and torch.equal(linear.weight.nan_to_num(), before.nan_to_num())
    linear.weight.fill_(1e-6)
    pack(linear, native=False)
    assert linear.packed is None, "nearly 0 is not nothing where all numbers are"


@pytest.mark.parametrize("rope", [None, LLAMA3, YARN | {"attention_factor": 1.1}])
def test_old_and_new_spellings_of_config_mean_the_same(rope, tmp_path):
    make_model("Qwen2", rope_parameters=rope, tie_word_embeddings=True).bfloat16().save_pretrained(tmp_path)
    new = load_config(tmp_path)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    scaling = raw.pop("rope_parameters")
    raw["rope_theta"] = scaling.pop("rope_theta")
    raw["rope_scaling"] = None if rope is None else {"type": scaling.pop("rope_type")} | scaling
    raw["torch_dtype"] = raw.pop("dtype")
    del raw["layer_types"]
    file.write_text(json.dumps(raw))
    old = load_config(tmp_path)
    assert (old.scaled_rope is None) == (new.scaled_rope is None) == (rope is None)
    assert msgspec.structs.replace(old, scaled_rope=new.scaled_rope) == new
    (ours, factor), (theirs, their_factor) = rope_frequencies(old), rope_frequencies(new)
    assert torch.equal(ours, theirs) and factor == their_factor
    assert new.dtype == "bfloat16"


def test_where_a_window_counts():
    """Published Qwen2 configs name a window and say `use_sliding_window: false`; Mistral's say null for none."""
    raw = make_model("Qwen2").config.to_dict() | {"sliding_window": 5, "max_window_layers": 1, "layer_types": None}
    raw |= {"architectures": ["Qwen2ForCausalLM"]}
    assert ModelConfig.from_hf(raw | {"use_sliding_window": False}).sliding_window == (None, None, None)
    with pytest.raises(UserError, match="a sliding window in some of the layers is not supported"):
        ModelConfig.from_hf(raw | {"use_sliding_window": True})
    raw |= {"architectures": ["MistralForCausalLM"]}
    assert ModelConfig.from_hf(raw).sliding_window == (5, 5, 5)
    assert ModelConfig.from_hf(raw | {"sliding_window": None}).sliding_window == (None, None, None)


def test_ids_that_end_a_text_come_from_both_files_once_each():
    raw = make_model("Llama").config.to_dict() | {"eos_token_id": 2, "architectures": ["LlamaForCausalLM"]}
    assert ModelConfig.from_hf(raw, {"eos_token_id": [5, 2, 7]}).eos_token_ids == (2, 5, 7)
    assert ModelConfig.from_hf(raw | {"eos_token_id": None}).eos_token_ids == ()
