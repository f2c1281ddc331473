# %% [markdown]
# # 04 The running loop
# The real scheduler, no model: tokens are made up. What a step computes is its plan, and the plan is all we look at.

# %%
from random import Random

from nanopd.core.scheduler import Scheduler
from nanopd_lessons import drive, show

# %% [markdown]
# ## One number for each request (S1)
# A prompt of 10 tokens, chunks of at most 4. Before each step we ask how many tokens it has, and how many are computed.

# %%
scheduler = drive.scheduler(num_blocks=8, long_prefill_token_threshold=4)
request = drive.request("A", 10, max_tokens=4)
scheduler.add_request(request)
rows = []
while scheduler.has_unfinished_requests():
    before = request.num_tokens_with_spec, request.num_computed_tokens
    plan = drive.step(scheduler)
    rows.append((*before, before[0] - before[1], plan.num_scheduled_tokens["A"], request.num_output_tokens))
show.table("one request", ("tokens", "computed", "missing", "in this step", "output after it"), rows)
assert [row[3] for row in rows] == [4, 4, 2, 1, 1, 1]
assert [row[4] for row in rows] == [0, 0, 1, 2, 3, 4], "a token is sampled when nothing is missing any more"
assert all(missing == 1 for _, _, missing, _, output in rows if output > 1), "decode is what missing = 1 looks like"
assert sum(row[3] for row in rows) == 10 + 4 - 1, "the last token is never computed: nobody asks what follows it"
assert request.num_tokens_with_spec == request.num_tokens == 14, "there are no drafts"

# %% [markdown]
# ## The least of four (S2)
# The engine's own function, with each of the four as the smallest once.

# %%
scheduler = drive.scheduler(num_blocks=100, max_model_len=300, long_prefill_token_threshold=64)
long = drive.request("long", 200)
short = drive.request("short", 20)
almost = drive.request("almost", 299)
almost.token_ids.extend([7, 8, 9])  # as if three drafts stood behind it
cases = [
    ("what is missing", short, 0, 100, 20),
    ("the chunk threshold", long, 0, 100, 64),
    ("the budget that is left", long, 0, 30, 30),
    ("the longest sequence", almost, 297, 100, 2),
]
rows = []
for least, r, computed, budget, expected in cases:
    got = scheduler._num_new_tokens(r, computed, budget)
    rows.append((least, r.num_tokens - computed, 64, budget, 300 - 1 - computed, got))
    assert got == expected
show.table("limits", ("the least is", "missing", "threshold", "budget", "max_model_len - 1 - computed", "tokens"), rows)

# %% [markdown]
# The fourth needed drafts to be the least. A request without them that is only stopped by `max_model_len`, step by step:

# %%
scheduler = drive.scheduler(num_blocks=100, max_model_len=30)
scheduler.add_request(ends := drive.request("ends", 10, max_tokens=100))
while scheduler.has_unfinished_requests():
    computed = ends.num_computed_tokens
    assert ends.num_tokens_with_spec - computed <= 30 - 1 - computed, (
        "the fourth limit is never less than what is missing"
    )
    drive.step(scheduler)
assert ends.num_tokens == 30

# %% [markdown]
# ## The question
# Three requests decode. A prompt of 1,000 tokens arrives; the budget is 64.


# %%
def busy(budget: int = 64, threshold: int = 0) -> Scheduler:
    """a, b and c have their first token and go on decoding."""
    options = {"max_num_batched_tokens": budget, "long_prefill_token_threshold": threshold}
    scheduler = drive.scheduler(num_blocks=200, block_size=16, max_model_len=2000, **options)
    for name in "abc":
        scheduler.add_request(drive.request(name, 8, max_tokens=500))
    drive.step(scheduler)
    return scheduler


def until_first_token(scheduler: Scheduler, *names: str) -> tuple[list[dict[str, int]], dict[str, int]]:
    """The plans until all of these have a token of output, and in which step each had its first."""
    plans: list[dict[str, int]] = []
    first: dict[str, int] = {}
    waiting_for = {name: scheduler.requests[name] for name in names}
    while len(first) < len(names):
        plans.append(drive.step(scheduler).num_scheduled_tokens)
        for name, r in waiting_for.items():
            if r.num_output_tokens:
                first.setdefault(name, len(plans))
    return plans, first


scheduler = busy()
scheduler.add_request(drive.request("long", 1000, max_tokens=5))
plans, first = until_first_token(scheduler, "long")
show.table(
    "tokens in each step",
    ("step", "a", "b", "c", "long", "sum"),
    [
        (i + 1, *(plan.get(name) for name in ("a", "b", "c", "long")), sum(plan.values()))
        for i, plan in enumerate(plans)
    ],
)
assert first == {"long": 17}
assert all(plan[name] == 1 for plan in plans for name in "abc"), "nobody who decodes misses a step"
assert [plan["long"] for plan in plans] == [61] * 16 + [24] and 16 * 61 + 24 == 1000
assert all(sum(plan.values()) == 64 for plan in plans[:-1]), "the budget is used up"

# %% [markdown]
# The same with a budget that swallows the prompt whole: one step, but one that is 1,003 tokens long. Whoever decodes waits
# for all of it.

# %%
scheduler = busy(budget=2048)
scheduler.add_request(drive.request("long", 1000))
plans, first = until_first_token(scheduler, "long")
assert first == {"long": 1} and sum(plans[0].values()) == 1003

# %% [markdown]
# ## The chunk threshold
# Behind the long prompt a short one arrives, of 20 tokens. Who runs comes first: without a threshold the long prompt takes
# all that the decodes leave, and nobody is admitted.

# %%
rows = []
for threshold in (0, 48, 16, 8):
    scheduler = busy(threshold=threshold)
    scheduler.add_request(drive.request("long", 1000))
    scheduler.add_request(drive.request("short", 20))
    plans, first = until_first_token(scheduler, "long", "short")
    rows.append((threshold, first["short"], first["long"], max(sum(plan.values()) for plan in plans)))
show.table(
    "budget 64: steps to the first token",
    ("threshold (0: none)", "the short prompt", "the long one", "tokens in the longest step"),
    rows,
)
assert rows == [(0, 17, 17, 64), (48, 2, 21, 64), (16, 2, 63, 35), (8, 3, 125, 19)]

# %% [markdown]
# A threshold does not ask whether anybody else is there: alone, the long prompt is cut just the same. And one that is not
# below the budget never does anything.

# %%
alone = []
for threshold in (0, 16, 64, 1000):
    scheduler = drive.scheduler(
        num_blocks=200,
        block_size=16,
        max_num_batched_tokens=64,
        long_prefill_token_threshold=threshold,
        max_model_len=2000,
    )
    scheduler.add_request(drive.request("long", 1000))
    alone.append(until_first_token(scheduler, "long")[1]["long"])
assert alone == [16, 63, 16, 16]

# %% [markdown]
# ## What the worker is told (S7)
# All of a request once; then only what is new: blocks, and where it stands.

# %%
scheduler = busy()
scheduler.add_request(drive.request("long", 1000, max_tokens=5))
told_tokens, told_blocks = 0, 0
for step in range(3):
    plan = drive.step(scheduler)
    if step < 2:
        show.plan(plan, f"plan of step {step + 1}")
    assert [new.request_id for new in plan.scheduled_new_reqs] == (["long"] if step == 0 else [])
    assert [known.request_id for known in plan.scheduled_cached_reqs] == ["a", "b", "c", "long"][: 3 + (step > 0)]
    told_tokens += sum(len(new.token_ids) for new in plan.scheduled_new_reqs)
    blocks = [new.block_ids for new in plan.scheduled_new_reqs] + [k.new_block_ids for k in plan.scheduled_cached_reqs]
    told_blocks += sum(map(len, blocks))
assert told_tokens == 1000, "in three steps each of its token ids was told once, and none of those that were sampled"
assert told_blocks == len(scheduler.kv.tables["long"]) == 12, "183 tokens: 12 blocks, each told once"
assert 3 * 61 == 183 and -(-183 // 16) == 12

# %% [markdown]
# ## As if the step had run (S8)
# Computed tokens move on when the plan is made. So the next step can be planned before the answer to this one is there: the
# long prompt goes on with its next chunk. Who decodes has nothing missing until its token comes: 0, skipped.

# %%
scheduler = busy()
scheduler.add_request(drive.request("long", 1000, max_tokens=5))
one = scheduler.schedule()
assert scheduler.requests["long"].num_computed_tokens == 61, "and nothing has been computed yet"
two = scheduler.schedule()
show.say(f"first plan:  {one.num_scheduled_tokens}\nsecond plan: {two.num_scheduled_tokens}")
assert one.num_scheduled_tokens == {"a": 1, "b": 1, "c": 1, "long": 61}
assert two.num_scheduled_tokens == {"long": 64}, "a, b and c: zero tokens, and the loop goes on"
assert two.scheduled_cached_reqs[0].num_computed_tokens == 61

# %% [markdown]
# ## If the step fails
# The long prompt's first chunk is computed. Its second is planned, and comes to nothing: `take_back`.

# %%
scheduler = busy()
for name, prompt in (("long", 1000), ("later", 20)):
    scheduler.add_request(drive.request(name, prompt))
long = scheduler.requests["long"]
drive.step(scheduler)


def found() -> int:
    """How many of the long prompt's blocks are in the hash table."""
    return sum(scheduler.kv.pool.get_cached_block(h) is not None for h in long.block_hashes)


assert (long.num_computed_tokens, found()) == (61, 3)
plan = scheduler.schedule()
assert (long.num_computed_tokens, found()) == (122, 7), "as if it had run"
show.queues(scheduler, "the step is planned")
scheduler.take_back(plan)
show.queues(scheduler, "it is taken back")
assert [r.request_id for r in scheduler.waiting] == [*plan.num_scheduled_tokens, "later"] == [*"abc", "long", "later"]
assert [r.status.name for r in scheduler.waiting] == ["PREEMPTED"] * 4 + ["WAITING"] and not scheduler.running
assert all(r.num_computed_tokens == 0 and r.request_id not in scheduler.kv.tables for r in scheduler.waiting)
assert found() == 3, "the four blocks that were to be filled cannot be found"
again = drive.step(scheduler)
assert {new.request_id: new.num_computed_tokens for new in again.scheduled_new_reqs}["long"] == 48 == 3 * 16

# %% [markdown]
# ## Continuous batching, counted
# 32 requests that give 4 to 64 tokens, 8 at a time. A static batch runs until its longest member has ended; here, whoever
# ends makes room at once.

# %%
random = Random(1)
outputs = [random.choice([4, 6, 8, 12, 16, 24, 64]) for _ in range(32)]
batches = [outputs[i : i + 8] for i in range(0, 32, 8)]
static_steps = sum(max(batch) for batch in batches)

scheduler = drive.scheduler(num_blocks=400, block_size=16, max_num_seqs=8)
for i, n in enumerate(outputs):
    scheduler.add_request(drive.request(f"r{i}", 8, max_tokens=n))
steps = drive.run(scheduler)
useful = sum(outputs)
show.table(
    "32 requests, 8 at a time",
    ("batching", "steps", "tokens of output", "rows that could have given one", "used"),
    [
        ("static", static_steps, useful, static_steps * 8, f"{useful / static_steps / 8:.0%}"),
        ("continuous", steps, useful, steps * 8, f"{useful / steps / 8:.0%}"),
    ],
)
assert (static_steps, steps, useful) == (256, 140, 830)
assert (static_steps * 8, steps * 8) == (2048, 1120)
assert (round(100 * useful / 2048), round(100 * useful / 1120)) == (41, 74)

# %% [markdown]
# Why not 100%? At the end the queue is empty and the last long ones run alone.

# %%
random = Random(1)
scheduler = drive.scheduler(num_blocks=400, block_size=16, max_num_seqs=8)
for i, n in enumerate(outputs):
    scheduler.add_request(drive.request(f"r{i}", 8, max_tokens=n))
widths = []
while scheduler.has_unfinished_requests():
    empty = not scheduler.waiting
    widths.append((empty, len(drive.step(scheduler).num_scheduled_tokens)))
assert all(width == 8 for empty, width in widths if not empty), "as long as somebody waits, every row is used"
assert (len(widths), sum(empty for empty, _ in widths)) == (140, 59)

# %% [markdown]
# ## Check yourself
# The questions of the text.

# %%
scheduler = drive.scheduler(num_blocks=100, max_num_batched_tokens=10, max_num_seqs=20)
for i in range(12):
    scheduler.add_request(drive.request(f"r{i:02}", 1, max_tokens=9))
plans = [drive.step(scheduler).num_scheduled_tokens for _ in range(3)]
assert list(plans[0]) == list(plans[1]) == list(plans[2]) == [f"r{i:02}" for i in range(10)], "the last two wait"

scheduler = busy(threshold=16)
scheduler.add_request(drive.request("long", 100))
plans, first = until_first_token(scheduler, "long")
assert first["long"] == 7 and [plan["long"] for plan in plans] == [16] * 6 + [4]

assert -(-130_000 // 512) == 254, "a report's numbers: the text has them"
