"""Drives the real scheduler without a model: the lessons' scripts say what was sampled, or let tokens be made up.

Nothing decides in here. `scheduler()` and `request()` only spare the scripts some arguments.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanopd.config import EngineConfig, SamplingParams
from nanopd.connector.base import KVConnectorScheduler
from nanopd.core.kv_cache import KVCacheManager
from nanopd.core.output import KVConnectorOutput, ModelRunnerOutput, SchedulerOutput
from nanopd.core.scheduler import Scheduler
from nanopd.request import Request

_FIRST_MADE_UP = 50_000  # tokens that nobody's prompt has


def scheduler(
    num_blocks: int,
    block_size: int = 4,
    max_model_len: int = 1000,
    connector: KVConnectorScheduler | None = None,
    **options: Any,
) -> Scheduler:
    """A scheduler over a pool of its own. `options`: fields of EngineConfig, such as `max_num_batched_tokens`."""
    prefix_caching = options.get("enable_prefix_caching", True)
    kv = KVCacheManager(num_blocks, block_size, prefix_caching)
    return Scheduler(EngineConfig(**options), kv, max_model_len, connector)


def request(request_id: str, prompt: int | Sequence[int], max_tokens: int = 4, **params: Any) -> Request:
    """A request. `prompt`: token ids, or how many; then they are its own, and no other request begins like it."""
    if isinstance(prompt, int):
        start = 100 * (1 + sum(request_id.encode()))
        prompt = range(start, start + prompt)
    return Request(request_id, list(prompt), SamplingParams(max_tokens=max_tokens, seed=0, **params), eos_token_ids=[2])


def finish_step(
    scheduler: Scheduler,
    plan: SchedulerOutput,
    tokens: Mapping[str, int] | None = None,
    transfers: KVConnectorOutput | None = None,
) -> dict[str, int]:
    """What the worker would answer to a plan: a token for each request whose tokens are all computed by it.

    Args:
        tokens: what is sampled for whom; the others get a token that depends on how many tokens they have.
        transfers: what the connector's worker half would report with this step.

    Returns:
        What was sampled, by request id.
    """
    sampled = {}
    for request_id in plan.num_scheduled_tokens:
        r = scheduler.requests[request_id]
        if r.num_computed_tokens == r.num_tokens:
            sampled[request_id] = (tokens or {}).get(request_id, _FIRST_MADE_UP + r.num_tokens)
    scheduler.update_from_output(plan, ModelRunnerOutput(sampled, {}, transfers))
    scheduler.check_invariants()
    return sampled


def step(
    scheduler: Scheduler, tokens: Mapping[str, int] | None = None, transfers: KVConnectorOutput | None = None
) -> SchedulerOutput:
    """One whole step; returns its plan."""
    plan = scheduler.schedule()
    finish_step(scheduler, plan, tokens, transfers)
    return plan


def run(scheduler: Scheduler, most: int = 1000) -> int:
    """Steps until nothing is unfinished; returns how many."""
    for steps in itertools.count():
        if not scheduler.has_unfinished_requests():
            return steps
        if steps == most:
            raise AssertionError(f"not finished after {most} steps: {scheduler!r}")
        step(scheduler)
    raise AssertionError("not reached")


def tiny_model(directory: Path, num_layers: int = 2, seed: int = 0) -> Path:
    """Writes a Llama with random weights (4 heads, 2 KV heads, head dim 16, 300 tokens), for what needs no sense.

    Returns the directory of the model. It has no tokenizer: prompts are token ids.
    """
    import json

    import torch
    from safetensors.torch import save_file

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": num_layers, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300, "max_position_embeddings": 2048}
    rest = {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
    chance = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=chance) * 0.25  # large, so that the best token is clearly the best

    weights = {"model.embed_tokens.weight": matrix(300, 64), "model.norm.weight": torch.ones(64)}
    for i in range(num_layers):
        layer = f"model.layers.{i}"
        for name, rows, columns in (
            ("self_attn.q_proj", 64, 64),
            ("self_attn.k_proj", 32, 64),
            ("self_attn.v_proj", 32, 64),
            ("self_attn.o_proj", 64, 64),
            ("mlp.gate_proj", 128, 64),
            ("mlp.up_proj", 128, 64),
            ("mlp.down_proj", 64, 128),
        ):
            weights[f"{layer}.{name}.weight"] = matrix(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}.{name}.weight"] = torch.ones(64)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(sizes | rest | {"eos_token_id": 299, "dtype": "float32"}))
    save_file(weights, directory / "model.safetensors")
    return directory


def byte_tokenizer(directory: Path, words: Sequence[str] = ()) -> Path:
    """Writes a tokenizer for `tiny_model`: token b is byte b, so a text is its UTF-8. Tokens from 256 on are `words`,
    which no text is encoded to but which can be sampled; token 299 is special and ends a text. Returns the directory.
    """
    import json

    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # A vocabulary is text, so each byte needs a character that can be shown; this assignment is GPT-2's.
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = itertools.count(256)
    alphabet = {b: chr(b if b in shown else next(rest)) for b in range(256)}
    vocabulary = {character: b for b, character in alphabet.items()}
    for i, word in enumerate([*words, *(f"unused {i}" for i in range(43 - len(words)))]):
        vocabulary["".join(alphabet[b] for b in word.encode())] = 256 + i
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return directory
