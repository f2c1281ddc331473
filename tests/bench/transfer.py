"""How fast KV blocks travel from one engine to another: `nanopd bench transfer`.

Two processes over loopback TCP, the real Producer, side channel, Consumer and Mooncake; only the model is left out. The
ceiling is one write of as many bytes from one run of memory to another, by the same Mooncake. Ceiling and requests take
turns, so that whatever else the machine does hits both; what is reported are medians, and for the share the median of
the shares of the rounds.

    fresh     both pools were empty: a prompt's blocks are neighbours
    churned   the same 300 requests have come to both sides, and gone at different times: its blocks lie anywhere
"""

import itertools
import multiprocessing
import random
import statistics
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from nanopd.config import LAYOUTS, KVTransferConfig, SamplingParams
from nanopd.connector.consumer import Consumer
from nanopd.connector.producer import Producer, SendPlan, Stage
from nanopd.connector.protocol import VERSION, Layout, Pull
from nanopd.connector.transport import MooncakeTransport
from nanopd.core.kv_cache import KVCacheManager
from nanopd.core.output import TransferStats
from nanopd.engine.core import has_instructions_for
from nanopd.models.config import ModelConfig
from nanopd.request import Request
from nanopd.worker.kv_memory import KVCache, bytes_per_block

BLOCK_SIZE, NUM_BLOCKS = 16, 512
TOKENS = (128, 512, 2048)
ON_P, ON_D = 2, 8  # requests at once that have churned the pools
MODEL = ModelConfig.from_hf(  # SmolLM2-135M; of these only layers, KV heads and head_dim count here
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
    }
)


class _End:
    """The KV memory of one engine in one layout, registered; all of it touched, for the first write to a page is slow."""

    def __init__(self, kv_layout: str, role: str) -> None:
        bf16 = has_instructions_for(torch.bfloat16)
        dtype = torch.bfloat16 if bf16 else torch.float32  # what `dtype: auto` gives on this machine
        self.config = KVTransferConfig(role=role, kv_port=0)
        self.memory = KVCache.allocate(MODEL, NUM_BLOCKS, BLOCK_SIZE, kv_layout, dtype, "cpu").memory
        self.memory.fill_(1)
        self.address = self.memory.data_ptr()
        shape = self.memory.shape
        dim = {"kv_first": 2, "blocks_first": 1, "cross_layer": 0}[kv_layout]
        run_bytes = shape[dim + 1 :].numel() * dtype.itemsize
        self.layout = Layout("bench", str(dtype), kv_layout, BLOCK_SIZE, shape[:dim].numel(), run_bytes, NUM_BLOCKS)
        self.block_bytes = bytes_per_block(MODEL, BLOCK_SIZE, dtype)
        self.transport = MooncakeTransport(self.config, self.address, self.memory.nbytes)


def _blocks(tokens: int, churned: bool, seed: int, most: int) -> list[int]:
    """The blocks that an engine's pool gives to a prompt; `churned`: after 300 others, of whom `most` were there at once.
    Equal seeds, the same others; when each of them ended is up to the engine."""
    lengths, ends = random.Random(seed), random.Random(seed * 100 + most)
    kv, live = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE, prefix_caching=False), list[str]()

    def allocate(request_id: str, num_tokens: int) -> None:
        assert kv.allocate_slots(Request(request_id, [0] * num_tokens, SamplingParams()), 0, num_tokens) is not None

    for i in range(300 if churned else 0):
        if len(live) == most:
            kv.free(live.pop(ends.randrange(most)))
        allocate(str(i), lengths.randrange(16, 1024))
        live.append(str(i))
    for request_id in live:
        kv.free(request_id)
    allocate("prompt", tokens)
    return kv.get_block_ids("prompt")


def _serve(pipe: Connection) -> None:
    """P's process: does what it is told, answers with seconds."""
    ends = {kv_layout: _End(kv_layout, "prefill") for kv_layout in LAYOUTS}
    producers = {
        kv_layout: Producer(end.config, end.transport, end.layout, end.address, TransferStats())
        for kv_layout, end in ends.items()
    }
    pipe.send({kv_layout: producer.port for kv_layout, producer in producers.items()})
    while (told := pipe.recv()) is not None:
        kv_layout, *rest = told
        if len(rest) == 3:  # the ceiling
            session, target, num_bytes = rest
            end = ends[kv_layout]
            start = time.perf_counter()
            failed = end.transport._engine.batch_transfer_sync_write(session, [end.address], [target], [num_bytes])
            pipe.send(time.perf_counter() - start)
            assert not failed
        else:  # a prompt that has been computed
            transfer_id, tokens = rest
            plan = SendPlan(transfer_id, transfer_id, *tokens)
            producers[kv_layout].update(plan)
            pipe.send(None)
    for producer in producers.values():
        producer.close()


def measure(rounds: int = 9) -> Iterator[dict[str, Any]]:
    """Rows for each layout, pool and length, after `rounds` rounds of all of them."""
    context = multiprocessing.get_context("fork")  # Mooncake is loaded after it, in each of the two
    pipe, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    ports = pipe.recv()
    ends = {kv_layout: _End(kv_layout, "decode") for kv_layout in LAYOUTS}
    consumer, numbers = Consumer(60.0, TransferStats()), itertools.count()
    cases = [(kv_layout, churned, tokens) for kv_layout in LAYOUTS for churned in (False, True) for tokens in TOKENS]
    ceilings: dict[Any, list[float]] = {case: [] for case in cases}
    answers: dict[Any, list[dict[str, float]]] = {case: [] for case in cases}
    for number in range(-1, rounds):  # one to warm up
        for case in cases:
            kv_layout, churned, tokens = case
            end = ends[kv_layout]
            write = kv_layout, end.transport.session, end.address, tokens // BLOCK_SIZE * end.block_bytes
            if number % 2:  # each is the first as often as the other
                pipe.send(write)
                ceiling = pipe.recv()
            answer = _request(pipe, consumer, ports[kv_layout], end, tokens, churned, number, str(next(numbers)))
            if number % 2 == 0:
                pipe.send(write)
                ceiling = pipe.recv()
            if number >= 0:
                ceilings[case].append(ceiling)
                answers[case].append(answer | {"share": ceiling / answer["seconds"]})
    consumer.close()
    pipe.send(None)
    process.join()
    for case in cases:
        kv_layout, churned, tokens = case
        median = {name: statistics.median(a[name] for a in answers[case]) for name in answers[case][0]}
        ceiling, seconds, num_bytes = statistics.median(ceilings[case]), median["seconds"], int(median["num_bytes"])
        yield {
            "engine": "nanopd",
            "bench": "transfer",
            "layout": kv_layout,
            "pool": "churned" if churned else "fresh",
            "tokens": tokens,
            "pieces": int(median["num_pieces"]),
            "bytes": num_bytes,
            "ms": 1e3 * seconds,
            "gib_per_s": num_bytes / seconds / 2**30,
            "ceiling_ms": 1e3 * ceiling,
            "ceiling_gib_per_s": num_bytes / ceiling / 2**30,
            "share_of_ceiling": median["share"],
            "ask_to_done_ms": 1e3 * median["ask_to_done"],
        }


def _request(
    pipe: Connection, consumer: Consumer, port: int, end: _End, tokens: int, churned: bool, seed: int, transfer_id: str
) -> dict[str, float]:
    """One prompt: P has it, D asks for it and waits until all is there. What P says of it, and how long it took D."""
    for stage, block_ids in ((Stage.STARTED, []), (Stage.COMPLETE, _blocks(tokens, churned, seed, ON_P))):
        pipe.send((end.layout.kv_layout, transfer_id, (tokens, b"", stage, block_ids)))
        pipe.recv()
    mine = _blocks(tokens, churned, seed, ON_D)
    pull = Pull(
        VERSION, transfer_id, end.transport.session, end.address, end.layout, tokens, b"", first_block=0, block_ids=mine
    )
    start = time.perf_counter()
    consumer.start(transfer_id, ("127.0.0.1", port), pull)
    while not (output := consumer.poll()).finished_recving:
        assert not output.failed_recving and not output.given_up
        time.sleep(0.0005)
    return output.transfers[transfer_id] | {"ask_to_done": time.perf_counter() - start}
