# %% [markdown]
# # 05 Preemption
# The real scheduler with pools that are too small. Blocks hold 4 tokens. The events are those of `nanopd trace`.

# %%
from random import Random
from unittest.mock import patch

from nanopd.config import UserError
from nanopd.core.output import SchedulerOutput
from nanopd.core.scheduler import Scheduler
from nanopd.request import RequestStatus
from nanopd.trace.events import Allocated, Event, Moved, Refused
from nanopd_lessons import drive, show

# %% [markdown]
# ## Three requests, nine blocks
# A, B and C, as in the drawing. Their prompts fill the pool. We write down what each step plans, and every event.

# %%
scheduler = drive.scheduler(num_blocks=9)
events: list[tuple[int, Event]] = []
step = 0
scheduler.trace = scheduler.kv.trace = lambda event: events.append((step, event))
for name, prompt, output in (("A", 13, 12), ("B", 10, 12), ("C", 5, 12)):
    scheduler.add_request(drive.request(name, prompt, max_tokens=output))
history = []
while scheduler.has_unfinished_requests():
    step += 1
    plan = drive.step(scheduler)
    waiting = " ".join(r.request_id for r in scheduler.waiting)
    history.append(
        (step, *(plan.num_scheduled_tokens.get(i) for i in "ABC"), scheduler.kv.pool.num_free_blocks, waiting)
    )
show.table("tokens in each step", ("step", "A", "B", "C", "free blocks after it", "waiting"), history)
moves = [(at, e.request_id, e.status, e.rule, e.by) for at, e in events if isinstance(e, Moved) and e.rule]
show.table("who moved", ("step", "request", "to", "rule", "for whom"), moves)
preemptions = [move for move in moves if move[2] == "preempted"]
assert preemptions[:2] == [(4, "C", "preempted", "S3 case A", "B"), (8, "B", "preempted", "S3 case B", "B")]

# %% [markdown]
# Step 4, case A: B's 13th token needs a fourth block, and none is free. C is the last of `running` and gives its two.
#
# Step 8, case B: B needs a fifth. Now B itself is the last. It goes, and A does not even notice.
#
# Steps 9 to 11: three blocks are free, all three B's. It has 17 tokens and needs two more. So it waits, and C behind it.

# %%
of_step = {at: [e for step, e in events if step == at] for at in (4, 8)}
refused, granted = ([e for e in of_step[4] if isinstance(e, kind)] for kind in (Refused, Allocated))
assert [(e.request_id, e.wanted, e.free) for e in refused] == [("B", 1, 0)]
assert [(e.request_id, len(e.block_ids)) for e in granted] == [("B", 1)], "the second try"
assert history[3][1:] == (1, 1, None, 1, "C"), "of C's two blocks one is left"
of_b = [type(e).__name__ for e in of_step[8] if getattr(e, "request_id", None) == "B"]
assert of_b == ["Refused", "Moved", "Freed"], "no second try"
assert history[7][1:] == (1, None, None, 4, "B C"), "B stands before C again: it came first"
assert [row[1:] for row in history[8:11]] == [(1, None, None, 3, "B C")] * 3
why = [(e.request_id, e.wanted, e.free) for at, e in events if isinstance(e, Refused) and at in (9, 10, 11)]
assert why == [("B", 2, 0)] * 3, "and C is not even asked"
assert history[12][1:] == (None, 5, 8, 2, "")

# %% [markdown]
# ## What it costs
# Every request needs prompt + output - 1 tokens. What was computed beyond that was computed twice.

# %%
needed = sum(prompt + output - 1 for prompt, output in ((13, 12), (10, 12), (5, 12)))
computed = scheduler.stats().num_scheduled_tokens
returns = [(at, e.request_id, e.num_computed) for at, e in events if isinstance(e, Moved) and e.status == "running"][3:]
show.table("who came back", ("step", "request", "tokens found"), returns)
show.say(f"needed {needed} tokens, computed {computed}: {computed - needed} twice")
assert (needed, computed) == (61, 72)
assert returns == [(13, "B", 12), (13, "C", 0)]
assert (16 - 12) + (7 - 0) == 72 - 61 == 11, "B had 16 computed, C had 7"

# %% [markdown]
# Tokens are never lost, only K and V: the output so far goes on as if it were prompt.

# %%
scheduler = drive.scheduler(num_blocks=9)
for name, prompt, output in (("A", 13, 12), ("B", 10, 12), ("C", 5, 12)):
    scheduler.add_request(drive.request(name, prompt, max_tokens=output))
for _ in range(7):
    drive.step(scheduler)
b = scheduler.requests["B"]
tokens, num_computed = b.token_ids.tolist(), b.num_computed_tokens
assert num_computed == 16 and b.num_output_tokens == 7
drive.step(scheduler)
assert b.status is RequestStatus.PREEMPTED and b.num_computed_tokens == 0
assert b.token_ids.tolist() == tokens
assert "B" not in scheduler.kv.tables and scheduler.waiting[0] is b

# %% [markdown]
# ## A load, counted
# Twelve requests, in pools of different sizes; blocks of 16, a budget of 256. How much is computed twice?


# %%
def load(num_blocks: int, cls: type[Scheduler] = Scheduler, **options: object) -> tuple[int, int, int]:
    """Preemptions, tokens computed twice, steps."""
    with patch("nanopd_lessons.drive.Scheduler", cls):
        scheduler = drive.scheduler(num_blocks, 16, **({"max_num_batched_tokens": 256} | options))
    random, needed, steps = Random(3), 0, 0
    for i in range(12):
        prompt, output = random.randint(20, 100), random.randint(30, 120)
        needed += prompt + output - 1
        scheduler.add_request(drive.request(f"r{i}", [1000 * i + j for j in range(prompt)], max_tokens=output))
    while scheduler.has_unfinished_requests():
        first = scheduler.running[0].request_id if scheduler.running else None
        plan = drive.step(scheduler)
        steps += 1
        assert plan.total_num_scheduled_tokens > 0, "S11: every step computes something"
        assert first not in plan.preempted_req_ids, "the first of running is never the victim"
    assert needed == 1775
    return scheduler.stats().num_preemptions, scheduler.stats().num_scheduled_tokens - needed, steps


rows = []
for num_blocks in (150, 60, 40, 20, 14):
    with_cache, without = load(num_blocks), load(num_blocks, enable_prefix_caching=False)
    rows.append((num_blocks, with_cache[0], with_cache[1], without[1], with_cache[2]))
show.table("1,775 tokens needed", ("blocks", "preemptions", "twice", "twice, without a prefix cache", "steps"), rows)
assert rows == [
    (150, 0, 0, 0, 111),
    (60, 6, 370, 434, 135),
    (40, 5, 336, 480, 207),
    (20, 8, 427, 667, 407),
    (14, 9, 378, 922, 638),
]

# %% [markdown]
# ## Why to the front of the queue?
# The same scheduler, except that a victim goes to the end of `waiting`.


# %%
class ToTheEnd(Scheduler):
    def _preempt(self, request, rule="", by=""):
        super()._preempt(request, rule, by)
        self.waiting.rotate(-1)


rows = []
for num_blocks in (60, 40):
    for where, cls in (("front", Scheduler), ("end", ToTheEnd)):
        rows.append((num_blocks, where, *load(num_blocks, cls, enable_prefix_caching=False)[:2]))
show.table("the victim goes to the ...", ("blocks", "of waiting", "preemptions", "computed twice"), rows)
assert rows == [(60, "front", 6, 434), (60, "end", 10, 673), (40, "front", 5, 480), (40, "end", 12, 1270)]

# %% [markdown]
# ## Why is nobody admitted in a step with a preemption?
# A scheduler that does not look at who was preempted. With a small budget, a victim comes back for one *chunk*: few blocks
# suffice for that. The next step throws it out again.


# %%
class Unseen(set):
    """A set that says that it is empty."""

    def __bool__(self):
        return False


class Hasty(Scheduler):
    def _schedule_running(self, output: SchedulerOutput) -> None:
        super()._schedule_running(output)
        output.preempted_req_ids = Unseen(output.preempted_req_ids)


rows = []
for cache in (True, False):
    for name, cls in (("S4", Scheduler), ("hasty", Hasty)):
        rows.append((cache, name, *load(14, cls, max_num_batched_tokens=64, enable_prefix_caching=cache)[:2]))
show.table("14 blocks, budget 64", ("prefix cache", "scheduler", "preemptions", "computed twice"), rows)
assert rows == [
    (True, "S4", 15, 578),
    (True, "hasty", 15, 578),
    (False, "S4", 161, 10_456),
    (False, "hasty", 313, 20_088),
]

# %% [markdown]
# S4 halves it. It does not end it: without a prefix cache a request that is let in for its first chunk is a request that
# will be thrown out. Here the cache ends it: there must be room for what it finds and for its chunk.
#
# ## One request alone always finishes (S9)
# `max_model_len` is never more than the pool holds, and what could never fit is refused when it comes.

# %%
scheduler = drive.scheduler(num_blocks=4, max_model_len=1000)
assert scheduler.max_model_len == 16
said = ""
try:
    scheduler.add_request(drive.request("too long", 16))
except UserError as error:
    said = str(error)
show.say(said)
assert "at most 15 tokens" in said
scheduler.add_request(longest := drive.request("longest", 15, max_tokens=100))
assert drive.run(scheduler) == 1 and longest.num_tokens == 16 and longest.metrics.num_preemptions == 0

# %% [markdown]
# Without this rule: a scheduler that believes it has room for 1,000 tokens, and chunks of 8. The only request needs a fifth
# block of four, preempts itself, comes back for its first chunk, and so on for ever.

# %%
scheduler = drive.scheduler(num_blocks=4, max_num_batched_tokens=8, enable_prefix_caching=False)
scheduler.max_model_len = 1000
scheduler.add_request(alone := drive.request("alone", 12, max_tokens=100))
for _ in range(1000):
    plan = drive.step(scheduler)
show.say(f"after 1,000 steps: {alone.num_output_tokens} tokens, preempted {alone.metrics.num_preemptions} times")
assert (alone.num_output_tokens, alone.metrics.num_preemptions) == (5, 332)

# %% [markdown]
# With one large chunk it is not even let in again. Nothing runs, nothing is on its way: S11 raises, instead of waiting.

# %%
scheduler = drive.scheduler(num_blocks=4)
scheduler.max_model_len = 1000
scheduler.add_request(drive.request("alone", 12, max_tokens=100))
said = ""
try:
    drive.run(scheduler, most=200)
except RuntimeError as error:
    said = str(error)
show.say(said)
assert said.startswith("nothing can be scheduled")

# %% [markdown]
# ## Somebody more urgent (S3)
# A ranks last and stands first: it came early, and is not urgent. 14 blocks of two tokens, chunks of at most 8. In the third
# step A gets its last four tokens, and then B wants a block. Nothing is left of A in the plan.

# %%
scheduler = drive.scheduler(
    num_blocks=14, block_size=2, long_prefill_token_threshold=8, scheduling_policy="priority", priority_seconds=10.0
)
events: list[Event] = []
a, b = drive.request("A", 20), drive.request("B", 8)
a.priority, b.priority = 3, 0
for request in (a, b):
    scheduler.add_request(request)
    drive.step(scheduler)
assert [r.request_id for r in scheduler.running] == ["A", "B"] and (a.num_computed_tokens, len(a.block_hashes)) == (
    16,
    10,
)
scheduler.trace = events.append
plan = scheduler.schedule()
case = next(event.rule for event in events if isinstance(event, Moved))
show.say(f"{case}: preempted {plan.preempted_req_ids}, the plan is {plan.num_scheduled_tokens}")
assert case == "S3 case C" and plan.num_scheduled_tokens == {"B": 1} and plan.total_num_scheduled_tokens == 1
found = [scheduler.kv.pool.get_cached_block(block_hash) is not None for block_hash in a.block_hashes]
assert found == [True] * 8 + [False] * 2, (
    "B popped one of the two blocks that A was to fill; the other is not found either"
)

# %% [markdown]
# Nobody starves. One seat, a request of priority 3, and each second one of priority 0.

# %%
scheduler = drive.scheduler(num_blocks=4, max_num_seqs=1, scheduling_policy="priority", priority_seconds=10.0)
patient = drive.request("patient", 4, max_tokens=1)
patient.priority, patient.metrics.arrival_time = 3, 0.5
scheduler.add_request(patient)
for second in range(1, 100):
    urgent = drive.request(f"urgent {second}", 4, max_tokens=1)
    urgent.metrics.arrival_time = float(second)
    scheduler.add_request(urgent)
    drive.step(scheduler)
    if patient.status.is_finished:
        break
show.say(f"overtaken {second - 1} times")
assert second - 1 == 30

# %% [markdown]
# ## Check yourself
# The questions of the text.

# %%
scheduler = drive.scheduler(num_blocks=6)
for name in "AB":
    scheduler.add_request(drive.request(name, 12, max_tokens=9))
drive.step(scheduler)
plan = drive.step(scheduler)
assert plan.preempted_req_ids == {"B"} and plan.num_scheduled_tokens == {"A": 1}, (
    "A's 13th token takes one of B's blocks"
)
assert scheduler.kv.pool.num_free_blocks == 2
b = scheduler.requests["B"]
assert b.num_tokens == 13 and len(scheduler.kv.get_computed_blocks(b)) == 2, "so 13 - 8 = 5 would be computed"

scheduler = drive.scheduler(num_blocks=9)
for name in "ABC":
    scheduler.add_request(drive.request(name, 12, max_tokens=9))
drive.step(scheduler)
plan = drive.step(scheduler)
assert plan.preempted_req_ids == {"C"} and scheduler.kv.pool.num_free_blocks == 1, "one victim served two"
