"""What the user asked for: EngineConfig and SamplingParams.

Both are frozen and check themselves once, when they are made. Nothing inside the engine checks them again, so a value
out of range has to be caught here, with a sentence that says what was wrong and what is allowed.

This file knows nothing about models, tensors or requests, and imports none of the libraries that deal with them: the
command line is built from the fields below (their help text becomes `--help`), and it must start fast.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

KVLayout = Literal["kv_first", "blocks_first", "cross_layer"]


class UserError(ValueError):
    """A mistake the user can mend. Its text is one sentence or two: what was wrong, and what to do.

    The command line prints it without a traceback and exits with code 2.
    """


def _opt(default: Any, help: str) -> Any:
    """A dataclass field that is also a command-line option."""
    return field(default=default, metadata={"help": help})


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise UserError(f"{name} is {value!r}; it must be {allowed}.")


def _is_int(value: object, low: int, high: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: object, low: float, high: float = math.inf) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


@dataclass(frozen=True)
class EngineConfig:
    """Options of one engine. Every field is a command-line option of the same name.

    `num_blocks` and `max_model_len` are wishes: what the engine ends up with depends on the model and on free memory,
    and is reported when it starts.
    """

    model: str | None = _opt(None, "Hugging Face directory or hub id, or a .gguf file; without it the default model.")
    dtype: str = _opt(
        "auto", "auto (what the checkpoint says; float32 on a CPU that has no bfloat16), float32, bfloat16 or float16."
    )
    block_size: int = _opt(16, "Tokens in one KV cache block.")
    num_blocks: int | None = _opt(None, "KV cache blocks; without it as many as the memory allows.")
    kv_cache_memory: str | None = _opt(
        None, "Memory for the KV cache, like 512MiB or 4GiB; without it a share of what is free."
    )
    max_model_len: int | None = _opt(
        None, "Longest prompt + output, in tokens; without it what the model was trained for."
    )
    max_num_seqs: int = _opt(64, "Most requests that run at the same time.")
    max_num_batched_tokens: int = _opt(2048, "Token budget of one step.")
    long_prefill_token_threshold: int = _opt(
        0, "Longest prefill chunk in one step, in tokens; 0: only the budget limits it."
    )
    enable_prefix_caching: bool = _opt(True, "Reuse the blocks of equal prefixes.")
    kv_layout: KVLayout = _opt("kv_first", "How the KV cache lies in memory: kv_first, blocks_first or cross_layer.")
    attention_backend: str = _opt("auto", "auto, cpu or triton.")
    seed: int = _opt(0, "Seed of requests that bring none of their own.")
    kv_load_failure_policy: Literal["recompute", "fail"] = _opt(
        "recompute", "After a failed KV load: recompute or fail (rule S10)."
    )
    check_invariants: bool = _opt(False, "Check the block pool after every step (rule K10); slow.")

    def __post_init__(self) -> None:
        _require(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        _require(_is_int(self.block_size, 1, 1024), "block_size", self.block_size, "a whole number from 1 to 1024")
        for name in ("num_blocks", "max_model_len"):
            value = getattr(self, name)
            _require(
                value is None or _is_int(value, 2 if name == "max_model_len" else 1),
                name,
                value,
                "a positive whole number",
            )
        _require(_is_int(self.max_num_seqs, 1), "max_num_seqs", self.max_num_seqs, "at least 1")
        _require(
            _is_int(self.max_num_batched_tokens, 1), "max_num_batched_tokens", self.max_num_batched_tokens, "at least 1"
        )
        threshold = self.long_prefill_token_threshold
        _require(_is_int(threshold, 0), "long_prefill_token_threshold", threshold, "at least 0")
        _require(self.kv_layout in LAYOUTS, "kv_layout", self.kv_layout, f"one of {', '.join(LAYOUTS)}")
        _require(
            self.attention_backend in BACKENDS,
            "attention_backend",
            self.attention_backend,
            f"one of {', '.join(BACKENDS)}",
        )
        _require(_is_int(self.seed, -(2**63), 2**63 - 1), "seed", self.seed, "a whole number of at most 64 bits")
        _require(
            self.kv_load_failure_policy in POLICIES,
            "kv_load_failure_policy",
            self.kv_load_failure_policy,
            f"one of {POLICIES}",
        )
        if self.kv_cache_memory is not None:
            parse_bytes(self.kv_cache_memory)


DTYPES = ("auto", "float32", "bfloat16", "float16")
LAYOUTS = ("kv_first", "blocks_first", "cross_layer")
BACKENDS = ("auto", "cpu", "triton")
POLICIES = ("recompute", "fail")


def parse_bytes(text: str) -> int:
    """'512MiB', '4GB', '1.5g' or '1000000' as a number of bytes. Raises UserError."""
    number = text.strip().lower().removesuffix("ib").removesuffix("b")
    power = {"k": 1, "m": 2, "g": 3, "t": 4}.get(number[-1:], 0)
    try:
        size = int(float(number[:-1] if power else number) * 1024**power)
        if size > 0:
            return size
    except (ValueError, OverflowError):
        pass
    raise UserError(f"{text!r} is not an amount of memory; write it like 512MiB or 4GiB.")


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the next token of one request, and when to stop. Names and defaults follow vLLM's SamplingParams.

    `temperature=0` is greedy. `logprobs=k` returns the log-probabilities of the sampled token and of the k best ones,
    computed from the model's raw logits (before penalties and temperature).
    """

    n: int = _opt(1, "Completions for each prompt.")
    temperature: float = _opt(1.0, "0 is greedy; higher is more random.")
    top_p: float = _opt(1.0, "Keep the smallest set of tokens whose probabilities add up to this.")
    top_k: int = _opt(0, "Keep only the k most probable tokens; 0: all.")
    min_p: float = _opt(0.0, "Drop tokens less probable than this share of the best one's probability.")
    seed: int | None = _opt(None, "Same seed, same tokens, whatever else is in the batch.")
    max_tokens: int = _opt(16, "Most tokens to generate.")
    min_tokens: int = _opt(0, "No end of sequence and no stop before this many tokens.")
    stop: tuple[str, ...] = _opt((), "Stop before this text appears (may be given several times).")
    stop_token_ids: tuple[int, ...] = _opt((), "Stop after this token (may be given several times).")
    ignore_eos: bool = _opt(False, "Do not stop at the end-of-sequence token.")
    repetition_penalty: float = _opt(1.0, "Above 1 makes tokens of the prompt and the output less likely.")
    presence_penalty: float = _opt(0.0, "Above 0 makes tokens of the output less likely.")
    frequency_penalty: float = _opt(0.0, "The same, times how often they appeared.")
    logprobs: int | None = _opt(None, "Return the log-probabilities of this many best tokens.")
    skip_special_tokens: bool = _opt(True, "Leave special tokens out of the text.")

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):  # a list or one string is as good as a tuple
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, (str, int)) else tuple(value or ()))
        _require(_is_int(self.n, 1, 128), "n", self.n, "a whole number from 1 to 128")
        _require(
            _is_number(self.temperature, 0, 1e4), "temperature", self.temperature, "a number from 0 (greedy) to 10000"
        )
        _require(_is_number(self.top_p, 0, 1) and self.top_p > 0, "top_p", self.top_p, "above 0 and at most 1")
        _require(_is_int(self.top_k, -1), "top_k", self.top_k, "at least 1, or 0 (or -1) for all tokens")
        _require(_is_number(self.min_p, 0, 1), "min_p", self.min_p, "from 0 to 1")
        _require(
            self.seed is None or _is_int(self.seed, -(2**63), 2**63 - 1),
            "seed",
            self.seed,
            "a whole number of at most 64 bits",
        )
        _require(_is_int(self.max_tokens, 1), "max_tokens", self.max_tokens, "at least 1")
        _require(
            _is_int(self.min_tokens, 0, self.max_tokens),
            "min_tokens",
            self.min_tokens,
            f"from 0 to max_tokens ({self.max_tokens})",
        )
        _require(all(isinstance(s, str) and s for s in self.stop), "stop", self.stop, "one or more non-empty strings")
        _require(
            all(_is_int(t, 0) for t in self.stop_token_ids),
            "stop_token_ids",
            self.stop_token_ids,
            "token ids (whole numbers)",
        )
        _require(
            _is_number(self.repetition_penalty, 0, 1e4) and self.repetition_penalty > 0,
            "repetition_penalty",
            self.repetition_penalty,
            "above 0",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _require(_is_number(getattr(self, name), -2, 2), name, getattr(self, name), "from -2 to 2")
        _require(self.logprobs is None or _is_int(self.logprobs, 0, 100), "logprobs", self.logprobs, "from 0 to 100")
