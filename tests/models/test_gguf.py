"""GGUF: tiny files written with the gguf package's own writer, in llama.cpp's conventions, and damaged ones."""

import random

import gguf
import pytest
import torch

from nanopd.config import UserError
from nanopd.models import gguf as ours
from nanopd.models.loader import load_config, load_model
from tests.models.conftest import assert_same_logits, logits_of, make_model

NAMES = {hf: name for name, hf in (ours.TOP | ours.LAYER).items()}


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
    writer.add_file_type(0)
    writer.add_eos_token_id(2)
    writer.add_token_list(["a", "é", "x"])  # arrays of texts and of numbers have to be walked over
    writer.add_token_types([1, 1, 3])
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


YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
YARN_META = {
    "add_rope_scaling_type": gguf.RopeScalingType.YARN,
    "add_rope_scaling_factor": 4.0,
    "add_rope_scaling_orig_ctx_len": 16,
}
FILES = {
    "llama": ("Llama", {}, {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}, {}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}, {}),
    "qwen2": ("Qwen2", {}, {}),
    "qwen3 tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}, {}),
    "qwen2 yarn": ("Qwen2", {"rope_parameters": YARN}, YARN_META),
}


@pytest.mark.parametrize("name", FILES)
def test_logits_are_those_of_the_model_the_file_was_made_from(name, tmp_path, ids):
    kind, options, meta = FILES[name]
    theirs = make_model(kind, **options)
    path = write(theirs, tmp_path / "m.gguf", meta)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
    assert_same_logits(logits_of(load_model(path, "auto", "cpu", 64), ids), expected)
    assert load_config(path).eos_token_ids == (2,)


def test_llama3_scaling_written_as_divisors(tmp_path, ids):
    """Llama 3.x files carry `rope_freqs.weight`, the frequencies' divisors, instead of the scaling's parameters."""
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 32}
    theirs = make_model("Llama", rope_parameters=rope | {"low_freq_factor": 1.0, "high_freq_factor": 4.0})
    plain = 1.0 / 500.0 ** (torch.arange(0, 12, 2) / 12)
    divisors = plain / theirs.model.rotary_emb.inv_freq
    path = write(theirs, tmp_path / "m.gguf", extra={"rope_freqs.weight": divisors})
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
    assert_same_logits(logits_of(load_model(path, "float32", "cpu", 64), ids), expected)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_quantised_tensors_are_read_as_the_gguf_package_reads_them(kind, tmp_path):
    kind = gguf.GGMLQuantizationType[kind]
    model = make_model("Qwen2", hidden_size=64, intermediate_size=96)
    path = write(model, tmp_path / "m.gguf", quantise=kind)
    loaded = load_model(path, "float32", "cpu", 64)
    for name, mine in (
        ("embed_tokens", loaded.embed_tokens),
        ("layers.1.mlp.down_proj", loaded.layers[1].mlp.down_proj),
    ):
        data = model.model.get_parameter(f"{name}.weight").detach().numpy()
        expected = gguf.quants.dequantize(gguf.quants.quantize(data, kind), kind)
        assert torch.equal(mine.weight, torch.from_numpy(expected.astype("float32")))


def _rewrite(path, after, old, new):
    data = path.read_bytes()
    at = data.index(old, data.index(after))
    path.write_bytes(data[:at] + new + data[at + len(old) :])


def test_what_is_refused(tmp_path):
    model = make_model("Qwen2")
    path = write(model, tmp_path / "m.gguf")
    _rewrite(path, b"general.architecture", b"qwen2", b"qwen9")
    with pytest.raises(
        UserError, match=r"m\.gguf: GGUF architecture 'qwen9' is not supported; supported: llama, qwen2"
    ):
        load_config(path)
    path = write(model, tmp_path / "n.gguf", extra={"blk.0.attn_sinks.weight": torch.zeros(4)})
    with pytest.raises(UserError, match=r"no place for 1 of the tensors: blk\.0\.attn_sinks\.weight"):
        load_model(path, "auto", "cpu", 64)
    path = write(model, tmp_path / "r.gguf", extra={"rope_freqs.weight": torch.ones(5)})
    with pytest.raises(UserError, match=r"rope_freqs\.weight has shape \(5,\), not \(6,\)"):
        load_config(path)
    path = write(model, tmp_path / "o.gguf", {"add_rope_scaling_attn_factors": 1.5})
    with pytest.raises(UserError, match=r"rope\.scaling\.attn_factor are not supported"):
        load_config(path)
    path = write(model, tmp_path / "p.gguf", {"add_rope_dimension_count": 6})
    with pytest.raises(UserError, match="rotated only in part"):
        load_config(path)


def test_a_file_cut_short_anywhere_is_a_user_error(tmp_path):
    data = write(make_model("Llama"), tmp_path / "m.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [0, 3, 4, 10, *range(24, 4000, 97), *range(4000, len(data) - 32, 20_011), len(data) - 33]:
        path.write_bytes(data[:size])
        with pytest.raises(UserError):
            load_model(path, "auto", "cpu", 64)


def test_a_file_with_random_damage_is_read_or_refused(tmp_path):
    """Nothing but UserError comes out, and no absurd amount of memory is asked for."""
    data = write(make_model("Llama", num_hidden_layers=1), tmp_path / "m.gguf").read_bytes()
    path, dice = tmp_path / "damaged.gguf", random.Random(5)
    refused = 0
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(dice.randint(1, 3)):
            damaged[dice.randrange(2500)] = dice.choice([0, 1, 0x7F, 0xFF, dice.randrange(256)])
        path.write_bytes(damaged)
        try:
            load_model(path, "auto", "cpu", 64)
        except UserError:
            refused += 1
    assert refused > 100
