"""What the tests of models share: tiny random models made by transformers, dense attention, the default model."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nanopd.models.config import ModelConfig
from nanopd.models.decoder import Attend, Decoder

SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_model(kind: str, seed: int = 0, **options):
    """A random transformers model. Biases and norm weights are random too: left at 0 and 1 they would hide mistakes."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**SIZES | {"initializer_range": 0.15} | options)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
    return model


def dense_attend(config: ModelConfig) -> Attend:
    """Causal attention over one sequence from position 0, with the sliding windows: no cache, no blocks."""

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        tokens, window = len(query), config.sliding_window[layer]
        distance = torch.arange(tokens)[:, None] - torch.arange(tokens)[None]
        seen = (distance >= 0) & (distance < (window or tokens))
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(0, 1)

    return attend


def logits_of(model: Decoder, ids: list[int]) -> Tensor:
    """[len(ids), V] float32."""
    hidden = model(torch.tensor(ids), torch.arange(len(ids)), dense_attend(model.config))
    return model.compute_logits(hidden)


def assert_same_logits(ours: Tensor, theirs: Tensor) -> None:
    """Equal up to float32 rounding, and the same token everywhere."""
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.fixture(scope="session")
def ids() -> list[int]:
    return torch.randint(0, 96, (60,), generator=torch.Generator().manual_seed(7)).tolist()


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The real default model's directory; fetched if the cache has none."""
    from nanopd.models.default import fetch_default_model

    return fetch_default_model()
