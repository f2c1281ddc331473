"""Drives the real scheduler without a model: the lessons' scripts say what was sampled, or let tokens be made up.

Nothing decides in here. `scheduler()` and `request()` only spare the scripts some arguments. `accesses()` watches the real
kernels in Triton's interpreter.
"""

import contextlib
import ctypes
import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

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
    structured_outputs: Any = None,
    **options: Any,
) -> Scheduler:
    """A scheduler over a pool of its own. `options`: fields of EngineConfig, such as `max_num_batched_tokens`."""
    prefix_caching = options.get("enable_prefix_caching", True)
    kv = KVCacheManager(num_blocks, block_size, prefix_caching)
    return Scheduler(EngineConfig(**options), kv, max_model_len, connector, structured_outputs)


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
        tokens: what is sampled for whom; the others get a token that depends on how many tokens they have. Drafts are never
            right here.
        transfers: what the connector's worker half would report with this step.

    Returns:
        What was sampled, by request id.
    """
    sampled = {}
    for request_id in plan.num_scheduled_tokens:
        r = scheduler.requests[request_id]
        if r.num_computed_tokens >= r.num_tokens:
            sampled[request_id] = (tokens or {}).get(request_id, _FIRST_MADE_UP + r.num_tokens)
    answer = ModelRunnerOutput({i: [token] for i, token in sampled.items()}, {}, transfers)
    scheduler.update_from_output(plan, answer)
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


def tiny_model(directory: Path, num_layers: int = 2, seed: int = 0, tied: bool = True) -> Path:
    """Writes a Llama with random weights (4 heads, 2 KV heads, head dim 16, 300 tokens), for what needs no sense.

    Returns the directory of the model. It has no tokenizer: prompts are token ids. `tied`: its output matrix is that of its
    embeddings.
    """
    import json

    import torch
    from safetensors.torch import save_file

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": num_layers, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300, "max_position_embeddings": 2048}
    rest = {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "tie_word_embeddings": tied}
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
    if not tied:
        weights["lm_head.weight"] = matrix(300, 64)
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


# ---------------------------------------------------------------- what a kernel touches (lessons 08 and 09)


@dataclass(frozen=True)
class Access:
    """One `tl.load` or `tl.store` of one program instance: the bytes that it really touched, masked ones left out."""

    program: tuple[int, int, int]
    kind: str  # "load" or "store"
    addresses: tuple[int, ...]  # of the elements' first bytes, in the kernel's order
    itemsize: int

    @property
    def num_bytes(self) -> int:
        return len(self.addresses) * self.itemsize

    def within(self, tensor: Any) -> bool:
        """Did it go to the memory that this tensor is a view of?"""
        start = tensor.untyped_storage().data_ptr()
        return all(start <= a < start + tensor.untyped_storage().nbytes() for a in self.addresses)


@contextlib.contextmanager
def accesses() -> Iterator[list[Access]]:
    """Notes each load and store of the kernels that run meanwhile in Triton's interpreter, in order."""
    from triton.runtime.interpreter import InterpreterBuilder

    seen: list[Access] = []

    def noting(kind: str, do: Any) -> Any:
        def wrapper(builder: Any, pointers: Any, *rest: Any) -> Any:
            mask = rest[0] if kind == "load" else rest[1]
            touched = tuple(map(int, pointers.data[mask.data.astype(bool)].ravel()))
            itemsize = pointers.get_element_ty().primitive_bitwidth // 8
            if touched:
                seen.append(Access(tuple(builder.grid_idx), kind, touched, itemsize))
            return do(builder, pointers, *rest)

        return wrapper

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    with (
        patch.object(InterpreterBuilder, "create_masked_load", noting("load", load)),
        patch.object(InterpreterBuilder, "create_masked_store", noting("store", store)),
    ):
        yield seen


# ---------------------------------------------------------------- two engines in one process (lessons 11 and 13)


class Node:
    """An engine with a connector (`role`: prefill or decode) or without one (None), stepped by hand.

    `transfer`: fields of KVTransferConfig; `options`: of EngineConfig. Imports torch.
    """

    def __init__(
        self, model: Path, role: str | None, transfer: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        from nanopd.config import KVTransferConfig
        from nanopd.engine.core import EngineCore

        defaults: dict[str, Any] = {"model": str(model), "block_size": 4, "num_blocks": 100, "check_invariants": True}
        options = defaults | options
        options = {"max_model_len": min(2048, options["num_blocks"] * options["block_size"])} | options
        kv_transfer = KVTransferConfig(**{"role": role, "kv_port": 0} | dict(transfer or {}))
        self.core = EngineCore(EngineConfig(**options), kv_transfer)
        self.scheduler = self.core.scheduler
        self.tokens: dict[str, list[int]] = {}
        self.answers: dict[str, dict[str, Any] | None] = {}  # kv_transfer_params of those that have ended

    def add(
        self, request_id: str, prompt: Sequence[int], max_tokens: int = 8, params: Mapping[str, Any] | None = None
    ) -> Request:
        """A greedy request. `params`: `kv_transfer_params`, as a router would send them."""
        from nanopd.connector.protocol import KVTransferParams

        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=0)
        transfer = KVTransferParams(**params) if params else None
        request = Request(request_id, list(prompt), sampling, kv_transfer_params=transfer)
        self.core.add_request(request)
        self.tokens[request_id] = []
        return request

    def prefill(self, request_id: str, prompt: Sequence[int]) -> Request:
        """What a router sends to P."""
        return self.add(request_id, prompt, 1, {"do_remote_decode": True, "transfer_id": request_id})

    def decode(self, request_id: str, prompt: Sequence[int], p: "Node", max_tokens: int = 8) -> Request:
        """What a router sends to D."""
        assert p.core.connector, "it has no role"
        where = {"remote_host": "127.0.0.1", "remote_port": p.core.connector.port, "transfer_id": request_id}
        return self.add(request_id, prompt, max_tokens, {"do_remote_prefill": True} | where)

    def step(self) -> None:
        """One step, if there is anything to do."""
        if self.core.has_unfinished_requests():
            for news in self.core.step():
                self.tokens[news.request_id] += news.new_token_ids
                if news.finish_reason:
                    self.answers[news.request_id] = news.kv_transfer_params

    def order_free_queue(self, block_ids: Sequence[int]) -> None:
        """These blocks will be popped next, in this order. All must be free."""
        pool = self.scheduler.kv.pool
        blocks = pool.get_new_blocks(pool.num_free_blocks)
        first = set(block_ids)
        pool.free(pool.blocks[i] for i in [*block_ids, *(b.block_id for b in blocks if b.block_id not in first)])


def run_nodes(*nodes: Node, until: Callable[[], bool] | None = None, seconds: float = 30.0) -> None:
    """Steps all of them until nothing is left to do, or until something is so. Nobody may hang."""
    end = time.monotonic() + seconds
    while not (until() if until else not any(node.core.has_unfinished_requests() for node in nodes)):
        for node in nodes:
            node.step()
        time.sleep(0.0005)  # to the threads that send
        assert time.monotonic() < end, f"not finished after {seconds} s: {[node.scheduler for node in nodes]}"


class MemoryTransport:
    """A Transport for two engines of one process: it copies. Takes MooncakeTransport's place where that is missing.

    Like Mooncake's engine it refuses what is not registered, here or there. `writes` has all that was ever written, as
    lists of pieces; `gate` is waited for before each write.
    """

    registered: dict[str, tuple[int, int]]
    writes: list[list[tuple[int, int, int]]]
    gate: threading.Event

    def __init__(self, config: Any, address: int, num_bytes: int) -> None:
        self.session, self._mine = f"memory:{len(self.registered)}", (address, num_bytes)
        self.registered[self.session] = self._mine

    def write(self, session: str, pieces: Iterable[tuple[int, int, int]], cancelled: Callable[[], bool]) -> None:
        from nanopd.connector.transport import TransferError

        self.writes.append(batch := [(int(s), int(t), int(n)) for s, t, n in pieces])
        while not self.gate.wait(0.01):
            if cancelled():
                raise TransferError("cancelled")
        for source, target, num_bytes in batch:
            for at, (start, size) in ((source, self._mine), (target, self.registered[session])):
                if num_bytes < 1 or not start <= at <= start + size - num_bytes:
                    raise TransferError(f"{num_bytes} bytes at {at} are not registered")
            ctypes.memmove(target, source, num_bytes)


@contextlib.contextmanager
def in_memory() -> Iterator[type[MemoryTransport]]:
    """Nodes made in here need neither Mooncake nor a network: their messages go through files, their blocks are copied."""
    ports = itertools.count(1)

    class Fresh(MemoryTransport):
        registered, writes, gate = {}, [], threading.Event()

    fresh = Fresh
    fresh.gate.set()
    with tempfile.TemporaryDirectory(prefix="kv") as directory, contextlib.ExitStack() as patches:

        def address(host: str, port: int | str) -> str:
            return f"ipc://{directory}/p:{next(ports) if port == '*' else port}"

        patches.enter_context(patch("nanopd.connector.protocol.tcp_address", address))
        patches.enter_context(patch("nanopd.connector.mooncake.MooncakeTransport", fresh))
        yield fresh
