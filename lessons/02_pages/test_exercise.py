"""What exercise 02 is graded by. `nanopd grade 02 FILE`, or `pytest` in this folder for exercise.py."""

from random import Random
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from nanopd.config import LAYOUTS
from nanopd.models.config import ModelConfig
from nanopd.worker.attention import AttentionMetadata
from nanopd.worker.kv_memory import KVCache
from nanopd_lessons.grading import case, generate


def small_cache(layout: str, num_blocks: int = 5, block_size: int = 4) -> KVCache:
    """Two layers, two KV heads of 4, float32."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "vocab_size": 9}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64}
    model = ModelConfig.from_hf({"architectures": ["LlamaForCausalLM"]} | sizes | heads)
    return KVCache.allocate(model, num_blocks, block_size, layout, torch.float32, "cpu")


def numbers(random: Random, num_tokens: int) -> Tensor:
    """[T, 2, 4], no zero among them."""
    return torch.tensor(
        [[[float(random.randint(1, 999)) for _ in range(4)] for _ in range(2)] for _ in range(num_tokens)]
    )


def written(cache: KVCache) -> dict[str, float]:
    """What is not zero in the whole memory, by number of the element."""
    flat = cache.memory.flatten().tolist()
    return {str(i): x for i, x in enumerate(flat) if x}


def int32(data: Any) -> Tensor:
    return torch.tensor(data, dtype=torch.int32)


@case(
    points=2, hint="Which row of the table does a token belong to? Here there is only one. Check positions 15 and 16."
)
def test_one_request(student: ModuleType, random: Random) -> Any:
    """Slots of one request's prompt, in blocks that are not neighbours"""
    block_size, n = random.choice([4, 8, 16]), random.randint(20, 40)
    table = random.sample(range(100), 12)
    out = torch.zeros(n, dtype=torch.int64)
    student.slot_mapping(torch.arange(n), int32([0, n]), int32([table]), block_size, out)
    return {"block size": block_size, "table": table, "slots": out.tolist()}


@case(
    points=3,
    hint="A token's position says where it is in its own request, not in the batch. And `out` held something before.",
)
def test_mixed_batch(student: ModuleType, random: Random) -> Any:
    """Slots of chunks and decodes in one batch, with padding behind them"""
    block_size, new = random.choice([4, 8]), [random.randint(2, 9), 1, random.randint(2, 9), 1]
    computed = [random.randint(0, 20) for _ in new]
    tables = [random.sample(range(60), 8) for _ in new]
    starts = [sum(new[:i]) for i in range(len(new) + 1)]
    positions = [p for c, n in zip(computed, new) for p in range(c, c + n)]
    out = torch.full((sum(new) + random.randint(1, 4),), 777, dtype=torch.int64)
    student.slot_mapping(torch.tensor(positions), int32(starts), int32(tables), block_size, out)
    return {"new tokens": new, "positions": positions, "slots": out.tolist()}


@case(
    points=3,
    hint="Does what you write reach the memory, or a copy of it? In some layouts `reshape` cannot give a view. "
    "And which place does Python mean by index -1?",
)
def test_store(student: ModuleType, random: Random) -> Any:
    """Stored keys and values lie where they should in each layout, and slot -1 writes nothing"""
    seen = {}
    for layout in LAYOUTS:
        cache = small_cache(layout)
        slots = [*random.sample(range(19), 5), -1, -1]
        random.shuffle(slots)
        key, value = numbers(random, 7), numbers(random, 7)
        student.store_kv(key, value, *cache.layers[random.randint(0, 1)], torch.tensor([*slots, -1]))
        seen[layout] = written(cache)
    return seen


@case(points=2, hint="The table's order is the order of positions. The last block is seldom full.")
def test_gather(student: ModuleType, random: Random) -> Any:
    """A request's keys come back in order, from any layout"""
    seen = {}
    for layout in LAYOUTS:
        cache = small_cache(layout)
        cache.memory.copy_(torch.arange(cache.memory.numel()).view(cache.memory.shape))
        table, seq_len = random.sample(range(5), 4), random.randint(5, 12)
        got = student.gather(cache.layers[1][random.randint(0, 1)], int32(table), seq_len)
        seen[layout] = {"table": table, "tokens": seq_len, "shape": list(got.shape), "values": got.flatten().tolist()}
    return seen


@case(
    points=3,
    hint="`half[i].storage_offset()` counts elements. Sort before you join, and look at what touches what in each layout.",
)
def test_pieces(student: ModuleType, random: Random) -> Any:
    """How many pieces of memory some blocks are"""
    seen = {}
    for layout in LAYOUTS:
        cache = small_cache(layout, num_blocks=12)
        first = random.randint(0, 4)
        for name, ids in {
            "one block": [random.randint(0, 11)],
            "neighbours": [first + 1, first, first + 2],
            "any": random.sample(range(12), 6),
        }.items():
            seen[f"{layout}, {name}"] = {"blocks": ids, "pieces": student.pieces(cache.layers, ids)}
    return seen


class StudentAttention:
    """An attention backend made of the student's functions: a request at a time, torch's attention on what is gathered."""

    def __init__(self, student: ModuleType) -> None:
        self.student = student

    def plan(self, metadata: AttentionMetadata, positions: Tensor, block_size: int) -> None:
        self.m = m = metadata
        self.student.slot_mapping(positions, m.query_start_loc, m.block_table, block_size, m.slot_mapping)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None
    ) -> Tensor:
        m, output, starts = self.m, torch.empty_like(query), self.m.query_start_loc.tolist()
        self.student.store_kv(key, value, k_cache, v_cache, m.slot_mapping)
        for r, seq_len in enumerate(m.seq_lens_list):
            chunk = slice(starts[r], starts[r + 1])
            k, v = (self.student.gather(c, m.block_table[r], seq_len).transpose(0, 1) for c in (k_cache, v_cache))
            q = query[chunk].transpose(0, 1)
            place = torch.arange(seq_len - q.shape[1], seq_len)[:, None]
            seen = torch.arange(seq_len) <= place
            out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=seen, enable_gqa=True)
            output[chunk] = out[0].transpose(0, 1)
        return output


@case(
    points=4,
    hint="All cases above are pieces of this one. Which of them fails first, and in which layout?",
    seconds=180,
)
def test_real_engine(student: ModuleType, random: Random) -> Any:
    """Your slots, store and gather serve real tokens in all three layouts, in chunks and beside decodes"""
    shared = [random.randrange(10, 290) for _ in range(16)]
    prompts = [shared + [random.randrange(10, 290) for _ in range(random.randint(1, 40))] for _ in range(3)]
    seen = {}
    with patch("nanopd.engine.core.choose_backend", lambda *_: StudentAttention(student)):
        for layout in LAYOUTS:
            options = {"kv_layout": layout, "attention_backend": "cpu", "max_num_batched_tokens": 32, "num_blocks": 16}
            seen[layout] = generate(prompts, max_tokens=6, **options)
    return seen
