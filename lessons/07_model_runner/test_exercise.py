"""What exercise 07 is graded by. `nanopd grade 07 FILE`, or `pytest` in this folder for exercise.py."""

from random import Random
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np

from nanopd_lessons.grading import case, generate

FIELDS = "input_ids", "positions", "slot_mapping", "query_start_loc", "seq_lens", "sampled", "logits_indices"


def batch(random: Random, kinds: str, block_size: int = 4) -> dict[str, Any]:
    """A made-up step. `kinds`: c a chunk, l a last chunk, p a whole prompt, d a decode."""
    query_lens, num_computed, num_tokens = [], [], []
    for kind in kinds:
        before = 0 if kind == "p" else random.randint(1, 20)
        new = 1 if kind == "d" else random.randint(2, 7)
        query_lens.append(new)
        num_computed.append(before)
        num_tokens.append(before + new + (random.randint(1, 9) if kind == "c" else 0))
    longest = max(num_tokens)
    blocks = -(-longest // block_size)
    ids = random.sample(range(len(kinds) * blocks + 3), len(kinds) * blocks)
    return {
        "query_lens": np.array(query_lens),
        "num_computed": np.array(num_computed),
        "num_tokens": np.array(num_tokens),
        "token_ids": np.array([[random.randrange(1000) for _ in range(longest)] for _ in kinds]),
        "block_table": np.array(ids, dtype=np.int32).reshape(len(kinds), blocks),
        "block_size": block_size,
    }


def plain(inputs: Any, *names: str) -> dict[str, list[int]]:
    return {name: np.asarray(getattr(inputs, name)).tolist() for name in names}


@case(points=2, hint="A request goes on where it stopped: what is its first new position?")
def test_positions(student: ModuleType, random: Random) -> Any:
    """Ids and positions: each request goes on where it stopped"""
    whole = student.prepare_inputs(**batch(random, "pp"))
    going_on = student.prepare_inputs(**batch(random, "dcl"))
    return {"whole prompts": plain(whole, *FIELDS[:2]), "going on": plain(going_on, *FIELDS[:2])}


@case(points=2, hint="Take one token and a pencil: which entry of whose table, and which place in that block?")
def test_slots(student: ModuleType, random: Random) -> Any:
    """Each token's slot comes from its own request's block table"""
    sizes = {f"blocks of {n}": batch(random, "cdlp", n) for n in (1, 4, 16)}
    return {name: plain(student.prepare_inputs(**made), "slot_mapping") for name, made in sizes.items()}


@case(
    points=2, hint="One of them has an entry more than there are requests. The other counts what will be in the cache."
)
def test_bounds(student: ModuleType, random: Random) -> Any:
    """Where each request begins in the batch, and how long it will be"""
    kinds = "".join(random.choices("cdlp", k=6))
    return plain(student.prepare_inputs(**batch(random, kinds)), "query_start_loc", "seq_lens")


@case(
    points=3,
    hint="Who has nothing left to compute after this step? A chunk can have one token, and a decode is one case of it.",
)
def test_logits(student: ModuleType, random: Random) -> Any:
    """Only requests that catch up are sampled, each from its last token"""
    some = student.prepare_inputs(**batch(random, "dclcpd"))
    made = batch(random, "ccd")
    made["query_lens"][0] = 1  # a chunk of one token, far from the end
    nobody = student.prepare_inputs(**batch(random, "cc"))
    names = "sampled", "logits_indices"
    chunk = student.prepare_inputs(**made)
    return {
        "a mixed batch": plain(some, *names),
        "a chunk of one": plain(chunk, *names),
        "chunks": plain(nobody, *names),
    }


@case(points=2, hint="What would the KV store do with a slot of 0? And what is the length of a request from 5 to 5?")
def test_padding(student: ModuleType, random: Random) -> Any:
    """A batch of decodes is padded: rows that write nothing and are never sampled"""
    inputs = student.prepare_inputs(**batch(random, "d" * random.randint(3, 6)))
    before = plain(inputs, *FIELDS)
    padded = student.pad_decodes(inputs, 8)
    return {"padded": plain(padded, *FIELDS), "left as it was": before == plain(inputs, *FIELDS)}


@case(points=2, hint="The cases above say which of the arrays is wrong.")
def test_many_batches(student: ModuleType, random: Random) -> Any:
    """50 random batches"""
    seen = []
    for _ in range(50):
        kinds = "".join(random.choices("cdlp", k=random.randint(1, 8)))
        seen.append(plain(student.prepare_inputs(**batch(random, kinds, random.choice((1, 2, 4, 16)))), *FIELDS))
    return {"batches": seen}


@case(
    points=4,
    hint="A wrong first token: look at positions and rows. Wrong only later: at slots and lengths.",
    seconds=60,
)
def test_real_engine(student: ModuleType, random: Random) -> Any:
    """Your batches in the real model runner: chunks, prefix hits, preemptions, and real tokens"""
    import torch

    from nanopd.worker.attention import AttentionMetadata, CPUAttention
    from nanopd.worker.model_runner import BatchExecution, ModelRunner, StepInputs

    build, plan = ModelRunner._build_attention_metadata, CPUAttention.plan
    made: Any = None
    shapes: list[list[int]] = []

    def prepare_inputs(self: ModelRunner, num_scheduled_tokens: dict[str, int]) -> StepInputs:
        nonlocal made
        ids, query_lens = list(num_scheduled_tokens), np.array(list(num_scheduled_tokens.values()))
        rows = np.array([self.rows[i] for i in ids])
        tables = self.num_computed_tokens[rows], self.num_tokens[rows], self.token_ids[rows], self.block_table[rows]
        made = student.prepare_inputs(query_lens.copy(), *tables, self.block_size)
        sampled = np.asarray(made.sampled, dtype=np.int64)
        self.input_ids.array[: query_lens.sum()] = made.input_ids
        self.positions.array[: query_lens.sum()] = made.positions
        self.logits_indices.array[: len(sampled)] = made.logits_indices
        shapes.append([len(ids), int(query_lens.sum()), len(sampled)])
        return StepInputs(ids, rows, query_lens, np.asarray(made.seq_lens), sampled, sampled * 0)

    def build_attention_metadata(self: ModelRunner, inputs: StepInputs, execution: BatchExecution) -> AttentionMetadata:
        metadata = build(self, inputs, execution)
        metadata.query_start_loc[:] = torch.as_tensor(np.asarray(made.query_start_loc))
        return metadata

    def plan_slots(self: CPUAttention, metadata: AttentionMetadata, positions: Any, block_size: int) -> None:
        plan(self, metadata, positions, block_size)
        metadata.slot_mapping[:] = torch.as_tensor(np.asarray(made.slot_mapping))
        self._slots = metadata.slot_mapping // block_size, metadata.slot_mapping % block_size

    shared = [random.randrange(10, 290) for _ in range(32)]
    prompts = [shared + [random.randrange(10, 290) for _ in range(random.randint(1, 20))] for _ in range(4)]
    with (
        patch.object(ModelRunner, "_prepare_inputs", prepare_inputs),
        patch.object(ModelRunner, "_build_attention_metadata", build_attention_metadata),
        patch.object(CPUAttention, "plan", plan_slots),
    ):
        result = generate(prompts, max_tokens=16, num_blocks=8, max_num_batched_tokens=24)
    return result | {"requests, tokens and samples of each step": shapes}
