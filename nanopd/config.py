"""What the user asked for: EngineConfig and SamplingParams.

Both are frozen and check themselves once, when they are made. Nothing inside the engine checks them again, so a value
out of range has to be caught here, with a sentence that says what was wrong and what is allowed.

This file knows nothing about models, tensors or requests, and imports none of the libraries that deal with them: the
command line is built from the fields below (their help text becomes `--help`), and it must start fast.
"""

from dataclasses import dataclass, field, fields
from typing import Any

import msgspec

LAYOUTS = ("kv_first", "blocks_first", "cross_layer")
DTYPES = ("auto", "float32", "bfloat16", "float16")
_INT64 = 2**63
_MANY = 2**31 - 1
MAX_GRAMMAR = 2**16  # bytes of a schema, a regex or a choice: to compile it takes time and memory


class UserError(ValueError):
    """A mistake the user can mend. Its text is one sentence or two: what was wrong, and what to do.

    The command line prints it without a traceback and exits with code 2.
    """


def require(holds: bool, sentence: str) -> None:
    """Raises UserError(sentence) unless it holds."""
    if not holds:
        raise UserError(sentence)


def opt(default: Any, help: str, low: float | None = None, high: float | None = None, choices: Any = ()) -> Any:
    """A field that is also a command-line option, with the values it may have: from `low` to `high`, or one of `choices`,
    which its help names.

    Where the ends are whole numbers, so must the value be. None is allowed where it is the default.
    """
    if choices:
        help = f"{help} One of: {', '.join(choices)}."
    return field(default=default, metadata={"help": help, "low": low, "high": high, "choices": choices})


def check(config: Any) -> None:
    """Raises UserError for the first field that has a value outside what its `opt` allows."""
    for f in fields(config):
        value, low, high, choices = getattr(config, f.name), *(f.metadata[name] for name in ("low", "high", "choices"))
        if value is None and f.default is None:
            continue
        if isinstance(f.default, bool):
            fits, allowed = isinstance(value, bool), "true or false"
        elif choices:
            fits, allowed = value in choices, f"one of {', '.join(choices)}"
        elif low is not None:
            whole = isinstance(low, int)
            number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
            fits, allowed = number and low <= value <= high, f"a {'whole ' if whole else ''}number from {low} to {high}"
        else:
            continue
        require(fits, f"{f.name} is {value!r}; it must be {allowed}.")


def parse_bytes(text: str) -> int:
    """'512MiB', '4GB', '1.5g' or '1000000' as a number of bytes. Raises UserError."""
    number = text.strip().lower().removesuffix("ib").removesuffix("b")
    power = {"k": 1, "m": 2, "g": 3, "t": 4}.get(number[-1:], 0)
    try:
        if (size := int(float(number[:-1] if power else number) * 1024**power)) > 0:
            return size
    except (ValueError, OverflowError):
        pass
    raise UserError(f"{text!r} is not an amount of memory; write it like 512MiB or 4GiB.")


@dataclass(frozen=True)
class EngineConfig:
    """Options of one engine. Every field is a command-line option of the same name.

    `num_blocks` and `max_model_len` are wishes: what the engine ends up with depends on the model and on free memory,
    and is reported when it starts.
    """

    model: str | None = opt(None, "Hugging Face directory or hub id, or a .gguf file; without it the default model.")
    dtype: str = opt("auto", "auto: what the checkpoint says, or float32 on a CPU without bfloat16.", choices=DTYPES)
    block_size: int = opt(16, "Tokens in one KV cache block.", 1, 1024)
    num_blocks: int | None = opt(None, "KV cache blocks; without it as many as the memory allows.", 1, _MANY)
    kv_cache_memory: str | None = opt(None, "Memory for the KV cache, like 4GiB; without it a share of what is free.")
    max_model_len: int | None = opt(None, "Most tokens of prompt + output; without it what the model knows.", 2, _MANY)
    max_num_seqs: int = opt(64, "Most requests that run at the same time.", 1, 65536)
    max_num_batched_tokens: int = opt(2048, "Token budget of one step.", 1, 2**20)
    long_prefill_token_threshold: int = opt(0, "Longest prefill chunk in tokens; 0: only the budget counts.", 0, _MANY)
    scheduling_policy: str = opt("fcfs", "Who goes first, by arrival or by priority.", choices=("fcfs", "priority"))
    priority_seconds: float = opt(10.0, "How many seconds of waiting one level of priority is worth.", 0.0, 1e9)
    speculative_ngram: int = opt(0, "Most draft tokens a step, looked up in a request's own text; 0: none.", 0, 64)
    enable_prefix_caching: bool = opt(True, "Reuse the blocks of equal prefixes.")
    kv_layout: str | None = opt(
        None, "Order in memory; without it cross_layer for P/D, else kv_first.", choices=LAYOUTS
    )
    attention_backend: str = opt("auto", "auto: triton on a GPU, else cpu.", choices=("auto", "cpu", "triton"))
    cascade_attention: bool = opt(False, "Attend to a prefix that all requests share once for all, where it pays.")
    seed: int = opt(0, "Seed of requests that bring none: same seed, same answers.", -_INT64, _INT64 - 1)
    kv_load_failure_policy: str = opt("recompute", "After a failed KV load (S10).", choices=("recompute", "fail"))
    trace: str | None = opt(None, "File to write a trace to: every decision, and all token ids; see nanopd trace.")
    check_invariants: bool = opt(False, "Check the block pool after every step (rule K10); slow.")

    def __post_init__(self) -> None:
        check(self)
        if self.kv_cache_memory is not None:
            parse_bytes(self.kv_cache_memory)


@dataclass(frozen=True)
class KVTransferConfig:
    """How KV blocks travel between a prefill engine (P) and a decode engine (D). Times are seconds."""

    role: str | None = opt(None, "Its part in P/D; without it a single node.", choices=("prefill", "decode", "both"))
    kv_host: str = opt("127.0.0.1", "Address of this node that its peers can reach, for messages and for KV blocks.")
    kv_port: int = opt(8998, "Port of the side channel on which a D asks this P for blocks; 0: any.", 0, 65535)
    kv_protocol: str = opt("tcp", "What Mooncake moves blocks over.", choices=("tcp", "rdma"))
    kv_device: str = opt("", "RDMA devices, comma-separated; empty: Mooncake chooses.")
    kv_push: str = opt("whole", "Send a prompt's blocks at once, or chunk by chunk.", choices=("whole", "per_chunk"))
    kv_send_order: str = opt("fifo", "Which send goes first.", choices=("fifo", "shortest"))
    kv_hold_timeout: float = opt(120.0, "How long P keeps the blocks of a prompt that no D has fetched.", 0.1, 1e6)
    kv_load_timeout: float = opt(60.0, "How long D waits for blocks before it computes them itself.", 0.1, 1e6)

    def __post_init__(self) -> None:
        check(self)


class StructuredOutputsParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an output has to look like (rule S12): exactly one of these. Names follow vLLM's StructuredOutputsParams.

    `json` is a JSON schema, as a dict or as text; `json_object` is any JSON object; a `regex` matches the whole output.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    json_object: bool = False

    @classmethod
    def of(cls, value: Any) -> "StructuredOutputsParams":
        """From what users write: an object of this class, its fields, or those as JSON. Raises UserError."""
        try:
            value = msgspec.json.decode(value) if isinstance(value, str) else msgspec.to_builtins(value)
            params, size = msgspec.convert(value, cls), len(msgspec.json.encode(value))
            if isinstance(params.json, str):
                msgspec.json.decode(params.json, type=dict[str, Any])
        except (msgspec.MsgspecError, TypeError, RecursionError) as error:
            raise UserError(f"structured_outputs: it, or the JSON in it, is not what it must be: {error}.") from None
        names = cls.__struct_fields__
        given = [name for name in names if getattr(params, name) not in (None, False, "", [])]
        require(len(given) == 1, f"structured_outputs needs exactly one of {', '.join(names)}, and not an empty one.")
        require(size <= MAX_GRAMMAR, f"structured_outputs has {size} bytes; at most {MAX_GRAMMAR} are allowed.")
        return params


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the next token of one request, and when to stop. Names and defaults follow vLLM's SamplingParams.

    `temperature=0` is greedy. `logprobs=k` returns the log-probabilities of the sampled token and of the k best ones,
    computed from the model's raw logits (before penalties and temperature).
    """

    n: int = opt(1, "Completions for each prompt.", 1, 128)
    temperature: float = opt(1.0, "0 is greedy; higher is more random.", 0.0, 1e4)
    top_p: float = opt(1.0, "Keep the smallest set of tokens whose probabilities add up to this.", 1e-6, 1.0)
    top_k: int = opt(0, "Keep only the k most probable tokens; 0 or -1: all.", -1, _MANY)
    min_p: float = opt(0.0, "Drop tokens less probable than this share of the best one's probability.", 0.0, 1.0)
    seed: int | None = opt(None, "Same seed, same tokens (up to rounding), whatever else runs.", -_INT64, _INT64 - 1)
    max_tokens: int = opt(16, "Most tokens to generate.", 1, _MANY)
    min_tokens: int = opt(0, "No end of sequence and no stop before this many tokens.", 0, _MANY)
    stop: tuple[str, ...] = opt((), "Stop before this text appears (may be given several times).")
    stop_token_ids: tuple[int, ...] = opt((), "Stop after this token (may be given several times).")
    ignore_eos: bool = opt(False, "Do not stop at the end-of-sequence token.")
    repetition_penalty: float = opt(1.0, "Above 1: tokens of prompt and output become less likely.", 0.01, 100.0)
    presence_penalty: float = opt(0.0, "Above 0 makes tokens of the output less likely.", -2.0, 2.0)
    frequency_penalty: float = opt(0.0, "The same, times how often they appeared.", -2.0, 2.0)
    logprobs: int | None = opt(None, "Return the log-probabilities of this many best tokens (with --json).", 0, 100)
    skip_special_tokens: bool = opt(True, "Leave special tokens out of the text.")
    structured_outputs: StructuredOutputsParams | None = opt(
        None, 'The form it must have: {"json": SCHEMA}, {"regex": TEXT}, {"choice": [TEXTS]} or {"json_object": true}.'
    )

    def __post_init__(self) -> None:
        check(self)
        if self.structured_outputs is not None:
            object.__setattr__(self, "structured_outputs", StructuredOutputsParams.of(self.structured_outputs))
        for name, kind in (("stop", str), ("stop_token_ids", int)):  # one, or a list, is as good as a tuple
            value = getattr(self, name)
            values = () if value is None else (value,) if isinstance(value, kind) else value
            good = isinstance(values, (list, tuple)) and all(type(v) is kind and v != "" for v in values)
            what = "token ids" if kind is int else "strings that are not empty"
            require(good, f"{name} is {value!r}; it must be a list of {what}.")
            object.__setattr__(self, name, tuple(values))
        limit = f"min_tokens is {self.min_tokens}; it must be at most max_tokens, {self.max_tokens}."
        require(self.min_tokens <= self.max_tokens, limit)
