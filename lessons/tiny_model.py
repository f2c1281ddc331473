"""A small random model, made on the spot: for drills, where what counts is whether tokens are right, not what they say.

Its weights are large enough that the best token is clearly the best, so equal tokens mean equal KV blocks.
"""

import json
from pathlib import Path
from typing import Any

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, POSITIONS = 300, 48, 96, 3, 6, 2, 16, 2048


def make(directory: Path) -> Path:
    """A Llama as a Hugging Face directory. Any id below VOCAB is a prompt token; as text it knows single bytes."""
    import torch  # here: naming the drills must not take seconds
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator) * 0.25

    weights = {"model.embed_tokens.weight": random(VOCAB, HIDDEN), "lm_head.weight": random(VOCAB, HIDDEN)}
    weights["model.norm.weight"] = torch.ones(HIDDEN)
    for i in range(LAYERS):
        layer, q, kv = f"model.layers.{i}.", HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        shapes = {"self_attn.q_proj": (q, HIDDEN), "self_attn.k_proj": (kv, HIDDEN), "self_attn.v_proj": (kv, HIDDEN)}
        shapes |= {"self_attn.o_proj": (HIDDEN, q), "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN)}
        shapes |= {"mlp.down_proj": (HIDDEN, INNER)}
        weights |= {f"{layer}{name}.weight": random(*shape) for name, shape in shapes.items()}
        weights |= {
            f"{layer}{name}.weight": torch.ones(HIDDEN) for name in ("input_layernorm", "post_attention_layernorm")
        }
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "hidden_act": "silu"}
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
    sizes |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}
    more = {"max_position_embeddings": POSITIONS, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps(config | sizes | more | {"eos_token_id": 256}))
    _save_tokenizer(directory)
    return directory


def _save_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"<eos>": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
