"""What exercise 12 is graded by."""

import ctypes
import sys
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from fabric import MAX_WR, SLICE_SIZE, Request, Segment

from nanopd.connector.protocol import Layout
from nanopd.connector.transport import pieces_of
from nanopd.models.config import ModelConfig
from nanopd.worker.kv_memory import KVCache
from nanopd_lessons.grading import case


class Memory:
    """Ours and the peer's, `num_bytes` each; ours is full of random bytes."""

    def __init__(self, random: Random, num_bytes: int, num_nics: int = 2) -> None:
        self.ours = np.frombuffer(random.randbytes(num_bytes), np.uint8)
        self.theirs = np.zeros(num_bytes, np.uint8)
        self.source, self.target = self.ours.ctypes.data, self.theirs.ctypes.data
        self.segment = Segment([(self.target, num_bytes)], num_nics)

    def request(self, offset: int, num_bytes: int) -> Request:
        return Request(self.source + offset, self.target + offset, num_bytes)

    def whole(self) -> bool:
        return bool((self.ours == self.theirs).all())


def numbers(request: Request) -> dict[str, Any]:
    return {
        "slices": request.num_slices,
        "ok": request.num_succeeded,
        "failed": request.num_failed,
        "is": request.status,
    }


def layout_of(cache: KVCache, name: str) -> Layout:
    """As nanopd/connector/mooncake.py tells it to a peer; model and dtype do not matter here."""
    shape, dim = cache.memory.shape, {"kv_first": 2, "blocks_first": 1, "cross_layer": 0}[name]
    run_bytes = shape[dim + 1 :].numel() * cache.memory.itemsize
    return Layout("model", "float32", name, 16, shape[:dim].numel(), run_bytes, shape[dim])


@case(
    points=2,
    hint="Walk through a request of SLICE_SIZE + FRAGMENT_LIMIT + 1 bytes by hand: where does the last cut fall?",
)
def test_cut(student: ModuleType, random: Random) -> Any:
    """Requests are cut into slices, and small rests get none of their own"""
    engine = student.Engine(Segment([(0, 2**40)], 1))
    sizes = [
        1,
        65_535,
        65_536,
        65_537,
        81_920,
        81_921,
        131_072,
        147_456,
        147_457,
        *(random.randint(1, 10**6) for _ in range(5)),
    ]
    seen = {}
    for size in sizes:
        request = Request(1000, 5000, size)
        slices = engine.cut(request)
        seen[size] = [[one.source - 1000, one.target - 5000, one.num_bytes] for one in slices], request.num_slices
    return seen


@case(points=2, hint="Number the slices of the whole batch, not those of each request.", seconds=8)
def test_submit(student: ModuleType, random: Random) -> Any:
    """Slices go to the cards in turn, and into the shard of their card"""
    engine = student.Engine(Segment([(0, 2**40)], nics := random.choice((3, 10))))
    engine.submit([Request(0, 0, random.randint(1, 4 * SLICE_SIZE)) for _ in range(12)])
    return {"cards": nics, "shards": [[(one.nic, one.num_bytes) for one in shard] for shard in engine.shards]}


@case(
    points=3, hint="Count before you post: how many are in flight on this queue pair, and how many may be?", seconds=8
)
def test_post(student: ModuleType, random: Random) -> Any:
    """Queue pairs are filled evenly, never beyond their depth; what does not fit waits its turn"""
    memory = Memory(random, 2000, num_nics=1)
    engine = student.Engine(memory.segment)
    seen = []
    for batch in (random.randint(3, 9), 500, 200):
        engine.submit([memory.request(i, 1) for i in range(batch)])
        engine.post()
        pairs = engine.endpoints[0].queue_pairs
        posted = [[len(pair.posted), pair.depth] for pair in pairs]
        first = [pair.posted[0].source - memory.source if pair.posted else None for pair in pairs]
        waiting = [one.source - memory.source for one in engine.shards[0]]
        seen.append({"posted and depth": posted, "first": first, "waiting": waiting})
    assert all(pair.depth <= MAX_WR for pair in pairs)
    return seen


@case(
    points=3,
    hint="What was counted up when a slice was posted must be counted down when its completion comes: good or bad.",
)
def test_poll(student: ModuleType, random: Random) -> Any:
    """Completions are counted, depths go down, and lost slices go to the next card"""
    memory = Memory(random, 1000, num_nics=3)
    engine = student.Engine(memory.segment)
    requests = [memory.request(i * 10, 10) for i in range(100)]
    engine.submit(requests)
    engine.post()
    broken = random.randrange(3)
    engine.endpoints[broken].up = False
    for endpoint in engine.endpoints:
        endpoint.work(random.randint(5, 12))
    engine.poll()
    return {
        "ok": sum(request.num_succeeded for request in requests),
        "depths": [[pair.depth for pair in endpoint.queue_pairs] for endpoint in engine.endpoints],
        "again": [[(one.nic, one.num_retries, one.source - memory.source) for one in shard] for shard in engine.shards],
    }


@case(points=2, hint="A batch is more than all queue pairs hold: what does `post` leave for the next turn?", seconds=8)
def test_many_turns(student: ModuleType, random: Random) -> Any:
    """A batch larger than all queues arrives whole"""
    memory = Memory(random, 6000 * 16, num_nics=2)
    engine = student.Engine(memory.segment)
    requests = [memory.request(i * 16, 16) for i in random.sample(range(6000), 6000)]
    code = engine.transfer_sync(requests, work=random.randint(10, 100))
    depths = [pair.depth for endpoint in engine.endpoints for pair in endpoint.queue_pairs]
    return {"code": code, "whole": memory.whole(), "depths": depths, "statuses": sorted({r.status for r in requests})}


@case(points=2, hint="A broken card is no broken batch, and a batch that cannot be written must end, too.", seconds=8)
def test_failures(student: ModuleType, random: Random) -> Any:
    """One dead card costs nothing but retries; all dead, or a wrong address, and the batch fails, but ends"""
    seen = {}
    for name, dead in (("one card", 1), ("all cards", 4)):
        memory = Memory(random, 40 * 100_000, num_nics=4)
        engine = student.Engine(memory.segment)
        for endpoint in random.sample(engine.endpoints, dead):
            endpoint.up = False
        requests = [memory.request(i * 100_000, 100_000) for i in range(40)]
        seen[name] = [engine.transfer_sync(requests), memory.whole(), numbers(requests[0])]
    memory = Memory(random, 1000)
    engine = student.Engine(memory.segment)
    requests = [memory.request(0, 500), Request(memory.source, memory.target + 999, 2)]
    code = engine.transfer_sync(requests)
    seen["wrong address"] = [code, *map(numbers, requests), memory.theirs[:500].tolist() == memory.ours[:500].tolist()]
    return seen


@case(points=4, hint="All the cases above are pieces of this one.", seconds=40)
def test_kv_blocks(student: ModuleType, random: Random) -> Any:
    """Your engine moves the KV blocks of a prompt between the real caches of two engines, in every layout"""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    rest = {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": 300, "max_position_embeddings": 512}
    model, seen = ModelConfig.from_hf({"architectures": ["LlamaForCausalLM"]} | sizes | rest), {}
    for name in ("kv_first", "blocks_first", "cross_layer"):
        p, d = (KVCache.allocate(model, 40, 16, name, torch.float32, "cpu") for _ in range(2))
        ours = p.memory.view(torch.uint8).flatten()
        ours.copy_(torch.frombuffer(bytearray(random.randbytes(ours.numel())), dtype=torch.uint8))
        theirs = d.memory.view(torch.uint8).flatten()
        theirs.zero_()
        layouts = [layout_of(cache, name) for cache in (p, d)]
        here, there = random.sample(range(40), 20), random.sample(range(40), 20)
        pieces = pieces_of(layouts[0], p.memory.data_ptr(), here, layouts[1], d.memory.data_ptr(), there)
        engine = student.Engine(Segment([(d.memory.data_ptr(), d.memory.nbytes)], 2))
        code = engine.transfer_sync([Request(*piece) for piece in pieces])
        digest = int(np.frombuffer(ctypes.string_at(d.memory.data_ptr(), d.memory.nbytes), np.uint64).sum() % 2**53)
        written = sum(endpoint.num_written for endpoint in engine.endpoints)
        seen[name] = {"code": code, "bytes": written, "sum of D's memory": digest}
    return seen
