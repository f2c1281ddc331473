"""Small random models, saved once a run by transformers, and what transformers itself says about them."""

from pathlib import Path
from typing import Any

import pytest
import torch

VOCAB_SIZE = 300


def _tokenizer_files(directory: Path) -> None:
    """A byte-level tokenizer: ids 0-255 are bytes, then <eos>. Made here, so that no hub is needed."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    fast.save_pretrained(directory)


def _save(directory: Path, kind: str, **options: Any) -> Path:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.25,  # large, so that the best token is clearly the best
        bos_token_id=None,
        eos_token_id=256,
        pad_token_id=None,
        **options,
    )
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(directory)
    _tokenizer_files(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 3 layers, 6 heads in groups of 3."""
    return _save(tmp_path_factory.mktemp("models") / "tiny-llama", "Llama", tie_word_embeddings=False)


@pytest.fixture(scope="session")
def tiny_mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mistral whose sliding window is shorter than the prompts."""
    return _save(tmp_path_factory.mktemp("models") / "tiny-mistral", "Mistral", sliding_window=24)


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 with YaRN."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    return _save(tmp_path_factory.mktemp("models") / "tiny-qwen3", "Qwen3", rope_parameters=rope)


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 (QKV bias) with linear RoPE scaling."""
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    return _save(tmp_path_factory.mktemp("models") / "tiny-qwen2", "Qwen2", rope_parameters=rope)


@torch.inference_mode()
def check_greedy(model_path: Path, prompt: list[int], tokens: list[int], min_margin: float = 1e-4) -> None:
    """Asserts that `tokens` are what transformers would have chosen greedily after `prompt`, in float32.

    One forward pass over prompt and answer: by induction, if each token is the best one after those before it, the
    whole is what `generate` gives. Only where the two best are closer than `min_margin` may the second stand.
    """
    logits = reference(model_path)(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    best = logits.topk(2, dim=-1)
    for i, token in enumerate(tokens):
        margin = float(best.values[i, 0] - best.values[i, 1])
        expected = best.indices[i].tolist()
        assert token == expected[0] or (margin < min_margin and token == expected[1]), (
            f"token {i} of {len(tokens)} after a prompt of {len(prompt)} is {token}, transformers says {expected[0]}"
        )


_references: dict[Path, Any] = {}


def reference(model_path: Path) -> Any:
    """The same model in transformers, float32."""
    if model_path not in _references:
        from transformers import AutoModelForCausalLM

        _references[model_path] = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    return _references[model_path]
