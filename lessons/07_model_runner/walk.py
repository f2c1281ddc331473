# %% [markdown]
# # 07 The model runner
# The real `ModelRunner` with a tiny model of random weights, on the CPU, stage by stage. Blocks hold 4 tokens; a step has a
# budget of 14.

# %%
import os
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # on a machine with a GPU too: all of this runs on the CPU

import numpy as np
import torch
import torch.nn.functional as F

from nanopd.config import EngineConfig, SamplingParams
from nanopd.engine.core import EngineCore
from nanopd.kernels.slot_mapping import slot_mapping
from nanopd.request import Request
from nanopd.worker.model_runner import BatchExecution, StepInputs
from nanopd_lessons import drive, show

folder = tempfile.TemporaryDirectory()
MODEL = str(drive.tiny_model(Path(folder.name) / "tiny"))
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, seed=0)


def engine(**options) -> EngineCore:
    defaults = {"dtype": "float32", "block_size": 4, "num_blocks": 64, "max_model_len": 64, "max_num_seqs": 8}
    return EngineCore(EngineConfig(model=MODEL, **(defaults | options)))


def prompt(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(10, 290, n).tolist()


PROMPTS = {"D": prompt(1, 8), "L": prompt(2, 10), "C": prompt(3, 20)}
core = engine(max_num_batched_tokens=14)
runner, scheduler = core.runner, core.scheduler

# %% [markdown]
# ## The step before
# D (8 tokens) and L (10 tokens) arrive. The budget is 14, so D is computed whole and L in part: 6 of 10. Only D has caught
# up, so only D gets a token.

# %%
for name in ("D", "L"):
    core.add_request(Request(name, PROMPTS[name], PARAMS))
news = core.step()
assert [n.request_id for n in news] == ["D"]
first_of_d = news[0].new_token_ids[0]

# %% [markdown]
# ## The plan of our step
# C arrives. Now one decode, one last chunk and one first chunk go into the same step: 1 + 4 + 9 tokens.

# %%
core.add_request(Request("C", PROMPTS["C"], PARAMS))
plan = scheduler.schedule()
show.plan(plan)
assert plan.num_scheduled_tokens == {"D": 1, "L": 4, "C": 9} and plan.total_num_scheduled_tokens == 14
assert [r.request_id for r in plan.scheduled_new_reqs] == ["C"], "whole data for the new one only (S7)"

# %% [markdown]
# ## 1. `_update_states`
# The runner keeps one row of numbers for each request. The plan says only what changed: D and L got one block each, and C
# is new. Nobody sends D's new token: the runner has sampled it itself and wrote it into its row.

# %%
assert [d.new_block_ids for d in plan.scheduled_cached_reqs] == [[4], [5]]
runner._update_states(plan)
rows = []
for name, row in runner.rows.items():
    n, blocks = runner.num_tokens[row], runner.block_table[row, : runner.num_blocks[row]]
    rows.append((row, name, int(n), int(runner.num_computed_tokens[row]), " ".join(f"B{i}" for i in blocks)))
show.table("the runner's rows", ("row", "request", "tokens", "computed", "block table"), rows)
assert [(name, n, computed) for _, name, n, computed, _ in rows] == [("D", 9, 8), ("L", 10, 6), ("C", 20, 0)]
assert [blocks for *_, blocks in rows] == ["B0 B1 B4", "B2 B3 B5", "B6 B7 B8"]
assert runner.token_ids[runner.rows["D"], 8] == first_of_d

# %% [markdown]
# ## 2. `_prepare_inputs`
# The new tokens of all, one behind the other: a flat batch of 14. Each token has a position of its own.

# %%
inputs = runner._prepare_inputs(plan.num_scheduled_tokens)
positions, input_ids = runner.positions.array[:14].copy(), runner.input_ids.array[:14].copy()
assert inputs.query_lens.tolist() == [1, 4, 9]
assert positions.tolist() == [8, *(6, 7, 8, 9), *range(9)]
assert input_ids.tolist() == [first_of_d, *PROMPTS["L"][6:10], *PROMPTS["C"][:9]]
assert inputs.seq_lens.tolist() == [9, 10, 9], "tokens in the cache after the step"

# %% [markdown]
# Who catches up? D: 9 of 9. L: 10 of 10. C: 9 of 20, no. The last token of each that does is at rows 0 and 4.

# %%
assert inputs.sampled.tolist() == [0, 1]
logits_indices = runner.logits_indices.array[:2].copy()
assert logits_indices.tolist() == [0, 4]

# %% [markdown]
# ## 3. `_determine_batch_execution_and_padding`
# No graphs are captured on a CPU, and this batch is not all decodes: eager, 14 tokens, no padding.

# %%
execution = runner._determine_batch_execution_and_padding(inputs)
assert execution == BatchExecution(use_graph=False, num_tokens=14)

# %% [markdown]
# What would a GPU do with three decodes? We pretend that sizes 1, 2, 4 and 8 were captured: it takes 4 and pads. The row
# that is added has no tokens (its start equals its end) and no length.

# %%
runner.graphs = dict.fromkeys((1, 2, 4, 8))
ones, three = np.ones(3, dtype=np.int64), np.arange(3)
decodes = StepInputs(["D", "L", "C"], three, ones, inputs.seq_lens, three, np.zeros(3, dtype=np.int64))
padded = runner._determine_batch_execution_and_padding(decodes)
assert padded == BatchExecution(use_graph=True, num_tokens=4)
metadata = runner._build_attention_metadata(decodes, padded)
assert metadata.query_start_loc.tolist() == [0, 1, 2, 3, 3] and metadata.seq_lens.tolist() == [9, 10, 9, 0]
assert not runner._determine_batch_execution_and_padding(inputs).use_graph, "a chunk in the batch: eager"
runner.graphs = {}

# %% [markdown]
# ## 4. `_build_attention_metadata`
# The numbers that every layer's attention needs.

# %%
runner._prepare_inputs(plan.num_scheduled_tokens)
metadata = runner._build_attention_metadata(inputs, execution)
assert metadata.query_start_loc.tolist() == [0, 1, 5, 14]
assert metadata.seq_lens.tolist() == [9, 10, 9]
assert metadata.block_table[:, :3].tolist() == [[0, 1, 4], [2, 3, 5], [6, 7, 8]]

# %% [markdown]
# ## 5. `_preprocess`
# Ids and positions go to the device, and each token gets its slot (K1).

# %%
with torch.inference_mode():
    ids_on_device, positions_on_device = runner._preprocess(execution, metadata)
slots = metadata.slot_mapping.tolist()
owner = np.repeat(["D", "L", "C"], inputs.query_lens)
show.table(
    "the batch",
    ("row", "request", "token id", "position", "slot", "logits"),
    [
        (i, owner[i], int(input_ids[i]), int(positions[i]), slots[i], i in logits_indices or None)
        for i in range(len(slots))
    ],
)
tables = {"D": [0, 1, 4], "L": [2, 3, 5], "C": [6, 7, 8]}
assert slots == [tables[who][p // 4] * 4 + p % 4 for who, p in zip(owner, positions.tolist())]
assert slots[1:5] == [14, 15, 20, 21], "L: two tokens at the end of B3, two at the beginning of B5"

# %% [markdown]
# The kernel that a GPU uses says the same, here in Triton's interpreter. Asked for a batch padded to 16, it writes -1
# behind the 14.

# %%
out = torch.zeros(16, dtype=torch.int64)
slot_mapping(positions_on_device, metadata.query_start_loc, metadata.block_table, 4, out)
assert out.tolist() == [*slots, -1, -1]

# %% [markdown]
# ## 6. Forward
# Out come 14 hidden states. On the way K and V of these 14 tokens were written: into their slots, and nowhere else.

# %%
memory = runner.kv_cache.memory  # (layer, 2, block, slot, head, dim)
before = memory.clone()
with torch.inference_mode():
    hidden_states = runner._model_forward(ids_on_device, positions_on_device, execution)
assert hidden_states.shape == (14, 64)
changed = (memory != before).any(dim=5).any(dim=4).all(dim=1).all(dim=0).flatten()
assert changed.nonzero().flatten().tolist() == sorted(slots)
assert (memory != before).any(dim=5).any(dim=4).any(dim=1).any(dim=0).sum() == 14

# %% [markdown]
# The model knew nothing of requests, blocks or batches. It calls `attend`, which the forward context gives it. We give it
# another `attend`: plain attention, no cache. L alone, all 10 tokens at once, has the same last hidden state as row 4.


# %%
def plain(layer, query, key, value):
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


with torch.inference_mode():
    alone = core.model(torch.tensor(PROMPTS["L"]), torch.arange(10), plain)
assert torch.allclose(alone[9], hidden_states[4], atol=1e-4)

# %% [markdown]
# ## 7. `hidden_states[logits_indices]`, logits, sample
# Two rows of 14 are turned into logits, and two tokens come out. C gets none.

# %%
with torch.inference_mode():
    sample_hidden_states = hidden_states[torch.from_numpy(logits_indices)]
    logits = core.model.compute_logits(sample_hidden_states)
    output = runner._sample(logits.clone(), inputs, {})
assert sample_hidden_states.shape == (2, 64) and logits.shape == (2, 300)
assert output.sampled_token_ids == dict(zip("DL", logits.argmax(dim=-1, keepdim=True).tolist()))
assert [int(runner.num_tokens[runner.rows[name]]) for name in "DLC"] == [10, 11, 20]
scheduler.update_from_output(plan, output)

# %% [markdown]
# Why not a token for each of C's nine? Each row could be asked what comes next. For the first eight the answer is known
# already: it stands in the prompt. For the ninth too: token 9 of 20.

# %%
with torch.inference_mode():
    guesses = core.model.compute_logits(hidden_states[5:14]).argmax(dim=-1).tolist()
show.table(
    "C", ("position", "model's guess for the next", "the prompt has"), zip(range(9), guesses, PROMPTS["C"][1:10])
)
assert len(guesses) == 9 and len(PROMPTS["C"][1:10]) == 9
assert guesses != PROMPTS["C"][1:10], "and nobody asked it"

# %% [markdown]
# And logits are dear. For the default model (49,152 tokens), a full step of 2,048 tokens, 4 bytes each: 384 MiB. For 64
# requests, one row each: 12 MiB.

# %%
vocabulary, budget, seats = 49_152, EngineConfig().max_num_batched_tokens, EngineConfig().max_num_seqs
assert budget == 2_048 and vocabulary * budget * 4 == 384 * 2**20
assert seats == 64 and vocabulary * seats * 4 == 12 * 2**20

# %% [markdown]
# ## It does not matter how the work is cut
# We finish this engine, and serve the same three prompts in other ways: each alone; in chunks of 3; with a pool that is
# too small, so that somebody is preempted; and with the prefix cache full.

# %%
tokens = {"D": [first_of_d, *output.sampled_token_ids["D"]], "L": output.sampled_token_ids["L"], "C": []}
while core.has_unfinished_requests():
    for item in core.step():
        tokens[item.request_id] += item.new_token_ids


def serve(core: EngineCore, names: str) -> dict[str, list[int]]:
    """Greedy tokens for these prompts, all queued at once."""
    got = {name: [] for name in names}
    for name in names:
        core.add_request(Request(name, PROMPTS[name], PARAMS))
    while core.has_unfinished_requests():
        for item in core.step():
            got[item.request_id] += item.new_token_ids
    return got


one_by_one = engine()
ways = {"each alone": serve(one_by_one, "D") | serve(one_by_one, "L") | serve(one_by_one, "C")}
ways["chunks of 3"] = serve(engine(max_num_batched_tokens=3), "DLC")
small = engine(num_blocks=11, max_model_len=32)
ways["small pool"] = serve(small, "DLC")
ways["prefix hits"] = serve(one_by_one, "DLC")
show.table(
    "tokens", ("way", *"DLC"), [(way, *(" ".join(map(str, got[n])) for n in "DLC")) for way, got in ways.items()]
)
assert all(got == tokens for got in ways.values())
assert small.scheduler.stats().num_preemptions > 0
assert one_by_one.scheduler.stats().prefix_cache_hits == 4 + 8 + 16

# %% [markdown]
# The *tokens* are equal. The logits are so up to rounding: the order in which numbers are added up depends on the shape
# of the batch, and with floats the order counts. In bfloat16 the steps are coarser: 8.00 and 8.02 are one number.

# %%
with torch.inference_mode():
    logits_alone = core.model.compute_logits(alone[9:])[0]
off = (logits_alone - logits[1]).abs().max().item()
first, second = logits_alone.topk(2).values.tolist()
show.say(f"largest difference {off:.1e}; the best token leads by {first - second:.2f}")
assert off < 1e-4 and first - second > 0.1
assert (0.1 + 0.2) + 0.3 != 0.1 + (0.2 + 0.3)
assert torch.tensor(8.02).bfloat16() == torch.tensor(8.00).bfloat16() and torch.tensor(8.02) != torch.tensor(8.00)

# %% [markdown]
# ## Check yourself
# 1. A batch of chunks (5 of 20), a decode, and a last chunk (3): query_start_loc, and the logits indices.
# 2. The slot of position 9 in the table B7 B2 B5, 4 tokens a block.
# 3. Five decodes, captured sizes 1, 2, 4, 8: three rows are added; their slots are -1.

# %%
query_lens, catches_up = np.array([5, 1, 3]), np.array([False, True, True])
ends = np.cumsum(query_lens)
assert [0, *ends.tolist()] == [0, 5, 6, 9] and (ends - 1)[catches_up].tolist() == [5, 8]

assert [7, 2, 5][9 // 4] * 4 + 9 % 4 == 21

runner.graphs = dict.fromkeys((1, 2, 4, 8))
ones, rows = np.ones(5, dtype=np.int64), np.arange(5)
five = StepInputs([], rows, ones, ones, rows, rows * 0)
assert runner._determine_batch_execution_and_padding(five) == BatchExecution(True, 8)
out = torch.zeros(8, dtype=torch.int64)
metadata = runner._build_attention_metadata(five, BatchExecution(True, 8))
slot_mapping(torch.zeros(8, dtype=torch.int64), metadata.query_start_loc, metadata.block_table, 4, out)
assert out[5:].tolist() == [-1, -1, -1] and (out[:5] >= 0).all()
folder.cleanup()
