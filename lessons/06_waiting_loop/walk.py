# %% [markdown]
# # 06 The waiting loop
# The real `Scheduler`, no model. A connector of ten lines plays the remote side: it knows how many tokens of whose prompt
# were computed elsewhere. When their data arrives, the script decides.

# %%
import tempfile
import time
from pathlib import Path

import numpy as np

from nanopd.config import SamplingParams
from nanopd.connector.base import KVConnectorScheduler
from nanopd.core.output import KVConnectorOutput
from nanopd.engine.structured_output import StructuredOutputManager
from nanopd.request import Request, RequestStatus
from nanopd_lessons import drive, show


class Remote(KVConnectorScheduler):
    """`has`: request id -> tokens of its prompt that lie elsewhere; None: still looking."""

    def __init__(self, **has):
        self.has, self.asked, self.loads = has, [], []

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self.asked.append(request.request_id)
        there = self.has.get(request.request_id, 0)
        return (None, False) if there is None else (max(0, there - num_computed_tokens), True)

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        if num_external_tokens:
            self.loads.append((request.request_id, block_ids, num_external_tokens))

    def build_connector_meta(self, scheduler_output):
        plan, self.loads = self.loads, []
        return plan


def ids(queue):
    return [r.request_id for r in queue]


# %% [markdown]
# ## Without a connector: first come, first served
# Two seats (`max_num_seqs`), four requests. The loop fills the seats and stops.

# %%
s = drive.scheduler(num_blocks=16, max_num_seqs=2)
for name in "ABCD":
    s.add_request(drive.request(name, 6))
plan = drive.step(s)
show.queues(s)
assert plan.num_scheduled_tokens == {"A": 6, "B": 6}
assert ids(s.running) == ["A", "B"] and ids(s.waiting) == ["C", "D"] and not s.skipped_waiting

# %% [markdown]
# ## The question, step 1
# All 8 tokens of A lie elsewhere. B and C are ordinary. A gets its blocks and no tokens; B and C run past it.

# %%
remote = Remote(A=8)
s = drive.scheduler(num_blocks=16, connector=remote, max_num_seqs=3)
a, b, c, d = (drive.request(name, 8, max_tokens=20) for name in "ABCD")
for r in (a, b, c):
    s.add_request(r)
plan = s.schedule()
show.plan(plan, "step 1")
assert plan.num_scheduled_tokens == {"B": 8, "C": 8}
assert a.status is RequestStatus.WAITING_FOR_REMOTE_KVS and s.loading == {"A"}
assert plan.kv_connector_metadata == [("A", s.kv.get_block_ids("A"), 8)] and len(s.kv.get_block_ids("A")) == 2
assert ids(s.skipped_waiting) == ["A"]
drive.finish_step(s, plan)

# %% [markdown]
# Its blocks are held, and not in the hash table: delayed caching (K8). Those of B, planned in the same step, are.

# %%
show.blocks(s.kv)
assert all(block.block_hash is None and block.ref_cnt == 1 for block in s.kv.tables["A"])
assert all(block.block_hash is not None for block in s.kv.tables["B"][:2])

# %% [markdown]
# ## Step 2: not there yet
# D has arrived and takes the third seat. A is offered promotion first; its data is not there; it is skipped again.
# At the end of the step the worker half reports: A's data has come.

# %%
s.add_request(d)
plan = drive.step(s, transfers=KVConnectorOutput(finished_recving={"A"}))
assert plan.num_scheduled_tokens == {"B": 1, "C": 1, "D": 8}
assert ids(s.skipped_waiting) == ["A"] and s.finished_recving_kv_req_ids == {"A"} and not s.loading
assert remote.asked.count("A") == 1, "whoever holds blocks is not looked up again"
show.queues(s, "after step 2: A's data is here, promotion comes later")

# %% [markdown]
# ## Step 3: promotion
# We abort B, so a seat is free. E has come before the step, but A stands in `skipped_waiting`: it goes first.
# All of its tokens came, so one is computed again: the last.

# %%
s.finish_requests(["B"])
e = drive.request("E", 8)
s.add_request(e)
plan = s.schedule()
show.plan(plan, "step 3")
assert plan.num_scheduled_tokens == {"C": 1, "D": 1, "A": 1} and ids(s.waiting) == ["E"]
(new,) = plan.scheduled_new_reqs
assert (new.request_id, new.num_computed_tokens) == ("A", 7)
assert all(block.block_hash is not None for block in s.kv.tables["A"][:2]), "registered at the promotion"
sampled = drive.finish_step(s, plan)
assert "A" in sampled, "the first token of A, after one computed token instead of eight"
history = [status for _, status in a.metrics.history]
assert history == ["waiting", "waiting for remote KVs", "waiting", "running"]
show.queues(s, "after step 3")

# %% [markdown]
# ## No seat, no promotion
# One seat. B took it while A was loading. A's data is here, but without a free seat the loop looks at nobody. Then we
# abort B.

# %%
s = drive.scheduler(num_blocks=16, connector=Remote(A=8), max_num_seqs=1)
a, b = (drive.request(name, 8, max_tokens=20) for name in "AB")
s.add_request(a)
s.add_request(b)
drive.step(s, transfers=KVConnectorOutput(finished_recving={"A"}))
assert drive.step(s).num_scheduled_tokens == {"B": 1}
show.queues(s, "loaded, and no seat")
assert a.status is RequestStatus.WAITING_FOR_REMOTE_KVS and s.finished_recving_kv_req_ids == {"A"}
assert all(block.block_hash is None for block in s.kv.tables["A"]), "held, and still not in the hash table"
s.finish_requests(["B"])
assert drive.step(s).num_scheduled_tokens == {"A": 1}

# %% [markdown]
# ## A remote hit, and no blocks for it
# A fills 3 of 4 blocks. The 8 tokens of B lie elsewhere, and need 2. B is a head that gets no blocks: the loop ends, and C
# does not pass. The next step asks about B again.

# %%
remote = Remote(B=8)
s = drive.scheduler(num_blocks=4, connector=remote)
s.add_request(drive.request("A", 10, max_tokens=2))
drive.step(s)
for name, tokens in (("B", 8), ("C", 2)):
    s.add_request(drive.request(name, tokens))
remote.asked = []
plan = drive.step(s)
assert plan.num_scheduled_tokens == {"A": 1} and not plan.kv_connector_metadata and not s.loading
assert ids(s.waiting) == ["B", "C"] and remote.asked == ["B"]
plan = drive.step(s)  # A has ended
assert remote.asked == ["B", "B", "C"] and s.loading == {"B"} and plan.num_scheduled_tokens == {"C": 2}

# %% [markdown]
# ## Local hit, then remote hit
# A computes its prompt here and ends. B begins with the same 4 tokens (one block), and all its 12 tokens lie elsewhere.
# The connector is asked for what is *beyond* the local hit: 8, not 12.

# %%
remote = Remote(B=12)
s = drive.scheduler(num_blocks=16, connector=remote)
shared = [7, 8, 9, 10]
s.add_request(drive.request("A", [*shared, 1, 2], max_tokens=1))
drive.step(s)
b = drive.request("B", [*shared, 21, 22, 23, 24, 25, 26, 27, 28])
s.add_request(b)
plan = drive.step(s)
((who, block_ids, num_external),) = plan.kv_connector_metadata
assert (who, len(block_ids), num_external) == ("B", 3, 8)
assert b.num_computed_tokens == 12 and b.num_external_tokens == 8
assert [block.block_hash is not None for block in s.kv.tables["B"]] == [True, False, False]

# %% [markdown]
# ## "Not known yet"
# The connector is still looking for A and says None. A is skipped without blocks; B runs. In the next step A is asked
# about first; now the answer is 0: nothing is there, and A computes like anyone else.

# %%
remote = Remote(A=None)
s = drive.scheduler(num_blocks=16, connector=remote)
for name in "AB":
    s.add_request(drive.request(name, 8))
plan = drive.step(s)
assert plan.num_scheduled_tokens == {"B": 8}
assert ids(s.skipped_waiting) == ["A"] and s.kv.get_block_ids("A") == []
remote.has["A"] = 0
plan = drive.step(s)
assert plan.num_scheduled_tokens == {"B": 1, "A": 8}
assert remote.asked == ["A", "B", "A"]

# %% [markdown]
# Whoever was skipped goes to the front of `skipped_waiting`, order kept (S6). Here A, B and C are skipped. Then the answer
# for B is known, and B takes the whole budget: C is not even reached, and stays behind A.

# %%
remote = Remote(A=None, B=None, C=None)
s = drive.scheduler(num_blocks=16, connector=remote, max_num_batched_tokens=8)
for name in "ABC":
    s.add_request(drive.request(name, 8))
drive.step(s)
assert ids(s.skipped_waiting) == ["A", "B", "C"]
remote.has["B"], remote.asked = 0, []
plan = drive.step(s)
assert plan.num_scheduled_tokens == {"B": 8} and remote.asked == ["A", "B"]
assert ids(s.skipped_waiting) == ["A", "C"]

# %% [markdown]
# ## A load fails
# `recompute` (the default): the blocks go back, the external tokens are forgotten, the connector is not asked again.


# %%
def failed_load(policy: str):
    """A scheduler and a request, whose load of 8 tokens has just failed, with the news that the failure made."""
    remote = Remote(A=8)
    s = drive.scheduler(num_blocks=16, connector=remote, kv_load_failure_policy=policy)
    s.add_request(a := drive.request("A", 8))
    plan = s.schedule()
    news = s.update_from_output(plan, drive.ModelRunnerOutput({}, {}, KVConnectorOutput(failed_recving={"A"})))
    return s, a, news, remote


s, a, news, remote = failed_load("recompute")
assert a.status is RequestStatus.WAITING and s.kv.pool.num_free_blocks == 16 and not news
plan = drive.step(s)
assert plan.num_scheduled_tokens == {"A": 8} and plan.kv_connector_metadata == []
assert remote.asked == ["A"], "it would only promise the same again"

# %% [markdown]
# `fail`: the client hears at once that it went wrong.

# %%
s, a, news, remote = failed_load("fail")
assert [(n.request_id, n.finish_reason) for n in news] == [("A", "error")] and not s.requests
assert s.kv.pool.num_free_blocks == 16
show.say(f"The client is told: {news[0].stop_reason}")

# %% [markdown]
# ## Nobody overtakes the head
# 6 blocks, 4 of them in use. B needs 3 and cannot have them. C would need one and does not get it: B is before it.

# %%
s = drive.scheduler(num_blocks=6)
s.add_request(drive.request("A", 13, max_tokens=3))
drive.step(s)
assert s.kv.pool.num_free_blocks == 2
for name, tokens in (("B", 10), ("C", 2)):
    s.add_request(drive.request(name, tokens))
plan = drive.step(s)
assert plan.num_scheduled_tokens == {"A": 1} and ids(s.waiting) == ["B", "C"]
show.queues(s, "2 blocks are free, and C would need one")
drive.step(s)  # the last token of A: its blocks are free
plan = drive.step(s)
show.plan(plan, "A has ended")
assert plan.num_scheduled_tokens == {"B": 10, "C": 2}

# %% [markdown]
# ## Who gives way (S10)
# 4 blocks of 4 tokens. A and B have 9 tokens each, 8 of them lie elsewhere. Each loads into 2 blocks: the pool is full.

# %%
remote = Remote(A=8, B=8)
s = drive.scheduler(num_blocks=4, connector=remote)
a, b = (drive.request(name, 9, max_tokens=2) for name in "AB")
s.add_request(a)
s.add_request(b)
plan = drive.step(s, transfers=KVConnectorOutput(finished_recving={"A", "B"}))
assert s.kv.pool.num_free_blocks == 0 and not plan.num_scheduled_tokens and not s.loading
show.blocks(s.kv, "both are loaded")

# %% [markdown]
# Both are loaded, neither can run: the ninth token needs a third block. Nobody runs who could free one. So B, the last that
# holds blocks, gives its own back. Nothing is computed in this step; in the next, A runs.

# %%
plan = drive.step(s)
assert not plan.num_scheduled_tokens and s.kv.pool.num_free_blocks == 2
assert s.kv.get_block_ids("B") == [] and not b.ask_connector and b.num_computed_tokens == 0
assert len(s.kv.get_block_ids("A")) == 2 and a.status is RequestStatus.WAITING
plan = drive.step(s)
assert plan.num_scheduled_tokens == {"A": 1}
show.queues(s, "A runs; B, once skipped, stays there until it runs")
assert ids(s.skipped_waiting) == ["B"] and b.status is RequestStatus.WAITING
drive.run(s)
assert s.kv.pool.num_free_blocks == 4 and a.num_output_tokens == b.num_output_tokens == 2

# %% [markdown]
# Without that rule: the same four blocks, the same step, over and over. We take the rule away and look.

# %%
remote = Remote(A=8, B=8)
s = drive.scheduler(num_blocks=4, connector=remote)
for name in "AB":
    s.add_request(drive.request(name, 9, max_tokens=2))
drive.step(s, transfers=KVConnectorOutput(finished_recving={"A", "B"}))
s._ensure_progress = lambda lookups_pending, preempted: None
for _ in range(50):
    assert not drive.step(s).num_scheduled_tokens, "for ever"

# %% [markdown]
# ## The grammar is not ready
# Now the real `StructuredOutputManager`, with a tokenizer in which token b is byte b and 299 ends a text. A's output must be
# two or three digits. A thread compiles that; the first step does not wait for it. B runs past.

# %%
directory = tempfile.TemporaryDirectory()
manager = StructuredOutputManager(drive.byte_tokenizer(Path(directory.name)), vocab_size=300, eos_token_ids=[299])
s = drive.scheduler(num_blocks=16, structured_outputs=manager)
a = drive.request("A", 8, stop_token_ids=[299], structured_outputs={"regex": "[0-9]{2,3}"})
b = drive.request("B", 8, max_tokens=200)
for r in (a, b):
    s.add_request(r)
plan = drive.step(s)
assert plan.num_scheduled_tokens == {"B": 8} and ids(s.skipped_waiting) == ["A"] and "A" not in s.kv.tables
assert a.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
show.queues(s, "B has passed")

# %% [markdown]
# Some step later it is compiled. A is promoted and computes its prompt like any other. Its plan brings a bitmask: 300 bits,
# of which those of the ten digits are set. B has no grammar, and none.


# %%
def allowed(plan):
    (bitmask,) = plan.grammar_bitmask["A"]
    return np.flatnonzero(np.unpackbits(np.frombuffer(bitmask, np.uint8), bitorder="little")).tolist()


while "A" in s.compiling:
    drive.step(s)
    time.sleep(0.01)
plan = s.schedule()
assert plan.num_scheduled_tokens == {"B": 1, "A": 8} and plan.grammar_bitmask.keys() == {"A"}
print("allowed first:", allowed(plan))
assert allowed(plan) == list(b"0123456789")
drive.finish_step(s, plan, {"A": ord("4")})

# %% [markdown]
# After two digits the text may end, or go on. Then A is preempted, and comes back with its tokens. The matcher stands where
# it stood.

# %%
drive.step(s, {"A": ord("2")})
s.take_back(s.schedule())  # a step that does not run preempts everyone in it
assert a.status is RequestStatus.PREEMPTED and a.num_computed_tokens == 0
plan = s.schedule()
print("allowed after 42:", allowed(plan))
assert allowed(plan) == [*b"0123456789", 299]
drive.finish_step(s, plan, {"A": 299})
assert a.status is RequestStatus.FINISHED_STOPPED and bytes(a.token_ids[8:-1].tolist()) == b"42"

# %% [markdown]
# A grammar that cannot be used ends its request alone, with the library's reason.

# %%
wrong = drive.request("W", 8, structured_outputs={"json": {"type": "integer", "minimum": 5, "maximum": 3}})
s.add_request(wrong)
while wrong.status is not RequestStatus.FINISHED_ERROR:
    drive.step(s)
    time.sleep(0.01)
print(wrong.stop_reason)
assert "minimum (5) is greater than maximum (3)" in wrong.stop_reason and b.status is RequestStatus.RUNNING
manager.close()

# %% [markdown]
# ## A session waits for its client (S13)
# S is a session: its request has a `turn`. It says 6 tokens and gets 3. Then it is idle: in none of the queues, with its
# blocks.


# %%
def say(s, turn, tokens, max_tokens=3):
    s.add_request(Request("S", tokens, SamplingParams(max_tokens=max_tokens, seed=0), turn=turn))


s = drive.scheduler(num_blocks=6, max_num_seqs=1)
say(s, 0, range(6))
drive.run(s)
session = s.requests["S"]
show.queues(s, "after the first answer")
assert session.status is RequestStatus.WAITING_FOR_STREAMING_REQ and ids(s.sessions.idle.values()) == ["S"]
assert session.num_tokens == 9 and len(s.kv.get_block_ids("S")) == 2 and not s.has_unfinished_requests()

# %% [markdown]
# 4 more tokens under the same id. 5 are computed: these, and the last of the answer. For the worker it is new again.
# While that runs, still more comes: it waits in the `streaming_queue`.

# %%
say(s, 1, range(20, 24))
plan = drive.step(s)
assert plan.num_scheduled_tokens == {"S": 5} and [new.num_computed_tokens for new in plan.scheduled_new_reqs] == [8]
say(s, 2, [30])
assert [turn.token_ids.tolist() for turn in session.streaming_queue] == [[30]]
drive.run(s)
assert session.turn == 2 and session.num_tokens == 9 + (4 + 3) + (1 + 3) and len(s.kv.get_block_ids("S")) == 5

# %% [markdown]
# S has been idle, with 5 of the 6 blocks. A comes and needs 2: S gives up its own, and nobody is preempted. Its blocks are
# free, and can still be found. A overwrites one of them; then S goes on.

# %%
s.add_request(drive.request("A", 6, max_tokens=2))
plan = drive.step(s)
assert plan.num_scheduled_tokens == {"A": 6} and "S" not in s.kv.tables and s._num_preemptions == 0
show.blocks(s.kv, "A runs, the blocks of S are free and have hashes")
drive.run(s)
say(s, 3, [40, 41])
plan = drive.step(s)
print("found again:", plan.scheduled_new_reqs[0].num_computed_tokens, "of", session.num_tokens - 1)
assert plan.scheduled_new_reqs[0].num_computed_tokens == 16 and plan.num_scheduled_tokens == {"S": 6}

# %% [markdown]
# ## Check yourself
# 1. 8 prompt tokens, 4 of them found here, all 8 elsewhere.

# %%
remote = Remote(B=8)
s = drive.scheduler(num_blocks=16, connector=remote)
s.add_request(drive.request("A", [1, 2, 3, 4, 5], max_tokens=1))
drive.step(s)
s.add_request(drive.request("B", [1, 2, 3, 4, 11, 12, 13, 14]))
plan = drive.step(s, transfers=KVConnectorOutput(finished_recving={"B"}))
assert plan.kv_connector_metadata[0][2] == 4
assert drive.step(s).num_scheduled_tokens == {"B": 1}

# %% [markdown]
# 2. Two requests with the same prompt ask in the same step.

# %%
remote = Remote(A=8, B=8)
s = drive.scheduler(num_blocks=16, connector=remote)
prompt = range(8)
for name in "AB":
    s.add_request(drive.request(name, prompt))
plan = drive.step(s, transfers=KVConnectorOutput(finished_recving={"A", "B"}))
assert [num for _, _, num in plan.kv_connector_metadata] == [8, 8], "B did not find what A still waits for"
drive.step(s)
assert [block.block_hash is None for block in s.kv.tables["B"][:2]] == [True, True], "twins (K7)"

# %% [markdown]
# 3. The head does not fit: nobody passes. The head waits for data: others pass.

# %%
for there, scheduled in ((0, {}), (8, {"C": 4})):
    remote = Remote(B=there)
    s = drive.scheduler(num_blocks=4, connector=remote)
    s.add_request(drive.request("A", 3, max_tokens=9))
    drive.step(s)
    for name, tokens in (("B", 13 if there == 0 else 8), ("C", 4)):
        s.add_request(drive.request(name, tokens))
    plan = drive.step(s)
    assert {i: n for i, n in plan.num_scheduled_tokens.items() if i != "A"} == scheduled

# %% [markdown]
# 4. The remote side has all 8 tokens: of how many does the step compute K and V again? One; its slot is in a block that is
# already in the hash table, and it gets the same contents once more.

# %%
remote = Remote(A=8)
s = drive.scheduler(num_blocks=16, connector=remote)
s.add_request(drive.request("A", 8))
drive.step(s, transfers=KVConnectorOutput(finished_recving={"A"}))
plan = drive.step(s)
(new,) = plan.scheduled_new_reqs
assert new.num_computed_tokens == 7 and plan.num_scheduled_tokens == {"A": 1}
assert s.kv.tables["A"][7 // 4].block_hash is not None

# %% [markdown]
# 6. A session has said 20 tokens and been answered with 5; then come 3. With its blocks; without them and a prefix cache.

# %%
for kept in (True, False):
    s = drive.scheduler(num_blocks=16, enable_prefix_caching=False)
    say(s, 0, range(20), max_tokens=5)
    drive.run(s)
    assert kept or s.sessions.take_blocks(s.sessions.idle.values())
    say(s, 1, range(3))
    assert drive.step(s).num_scheduled_tokens == {"S": 4 if kept else 28}
