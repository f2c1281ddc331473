"""A model's sizes, for tests that need no weights."""

from nanopd.models.config import ModelConfig


def tiny_config(kv_heads: int, head_dim: int) -> ModelConfig:
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6}
    rest = {"num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": 300, "max_position_embeddings": 512}
    return ModelConfig.from_hf({"architectures": ["LlamaForCausalLM"]} | sizes | rest)
