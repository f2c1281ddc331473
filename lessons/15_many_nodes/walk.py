# %% [markdown]
# # 15 Many nodes
# Real schedulers, real block pools and the real router's choice, in virtual time. No clock is read, so each number is
# the same on every machine.

# %%
from collections import Counter
from unittest.mock import patch

from nanopd.serve.router import POLICIES
from nanopd_lessons import course, show
from nanopd_lessons.cluster import BLOCK_SIZE, Asked, Cluster, Machine, Outcome, hit_rate, percentile, read_trace

here = course.find("15").path
documents, conversations = read_trace(here / "documents.jsonl"), read_trace(here / "conversations.jsonl")[:80]
first = documents[:120]  # enough for the second half of the lesson

# %% [markdown]
# ## Two traces
# A request of a trace is a time, two lengths, and an id for each block of 512 tokens of its prompt. How much of the
# prompts could a cache without limits find?


# %%
def seen_before(trace: list[Asked]) -> float:
    seen, hits = set(), 0
    for asked in trace:
        hits += len(seen.intersection(asked.hash_ids))
        seen.update(asked.hash_ids)
    return hits / sum(len(asked.hash_ids) for asked in trace)


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


show.table(
    "the traces",
    ("trace", "requests", "seconds", "prompt tokens, mean", "answer tokens, mean", "share of blocks seen before"),
    [
        (name, len(t), t[-1].at, mean(a.num_tokens for a in t), mean(a.max_tokens for a in t), seen_before(t))
        for name, t in (("documents", documents), ("conversations", conversations))
    ],
)
assert len(documents) == 200 and round(mean(a.num_tokens for a in documents)) == 22_298
assert round(100 * seen_before(documents)) == 52 and round(100 * seen_before(conversations)) == 5

# %% [markdown]
# All conversations begin with the same block, a system prompt. The documents begin in many ways, and some are asked
# about several times.

# %%
assert {asked.hash_ids[0] for asked in conversations} == {0}
first_blocks = Counter(asked.hash_ids[0] for asked in documents)
assert len(first_blocks) == 96 and first_blocks.most_common(1)[0][1] == 7

# %% [markdown]
# ## A node, and how long its step takes
# The ids become tokens, so the node's own prefix cache finds what the ids promise. The length of a step comes from a
# roofline (lesson 01): here of a GPU of the H100 kind, and a model of 8 billion parameters.

# %%
machine = Machine()
steps = {
    "one decode": machine.step_seconds([(8192, 1)]),
    "32 decodes": machine.step_seconds([(8192, 1)] * 32),
    "2,048 tokens of a prompt": machine.step_seconds([(0, 2048)]),
    "both": machine.step_seconds([(8192, 1)] * 32 + [(0, 2048)]),
}
show.table("one step, with 8,192 tokens of context", ("work", "ms"), [(k, 1000 * s) for k, s in steps.items()])
assert steps["32 decodes"] < 3 * steps["one decode"], "decodes share the weights that a step reads"
assert [round(1000 * s) for s in steps.values()] == [9, 22, 87, 88], "whoever decodes beside a prefill waits for it"

# %% [markdown]
# ## Three policies
# Four nodes, the documents at 0.6 times their speed, each policy of the router. A request is good if its first token
# comes within 5 seconds and the mean gap between its tokens is at most 50 ms.

# %%
TTFT, ITL = 5.0, 0.05
COLUMNS = ("run", "hit rate", "TTFT p50", "p90", "ITL p90 (ms)", "worst gap p99 (ms)", "most uneven", "good")


def good(outcomes: list[Outcome]) -> int:
    return sum(o.within(TTFT, ITL) for o in outcomes)


def row(name: str, cluster: Cluster, outcomes: list[Outcome]) -> tuple:
    ttft, itl = [o.ttft for o in outcomes], [1000 * o.itl for o in outcomes]
    worst = percentile((1000 * max(o.gaps, default=0) for o in outcomes), 0.99)
    p50, p90 = percentile(ttft, 0.5), percentile(ttft, 0.9)
    return (name, hit_rate(cluster), p50, p90, percentile(itl, 0.9), worst, cluster.most_uneven, good(outcomes))


def play(trace, speed, policy, **more) -> tuple[Cluster, list[Outcome]]:
    failures = more.pop("failures", ())
    cluster = Cluster(policy, 4, **more)
    return cluster, cluster.run(trace, speed, failures)


runs = {policy: play(documents, 0.6, policy) for policy in POLICIES}
show.table("documents, four nodes", COLUMNS, [row(name, *run) for name, run in runs.items()])
assert {policy: good(outcomes) for policy, (_, outcomes) in runs.items()} == {
    "round_robin": 93,
    "least_loaded": 132,
    "prefix_aware": 172,
}
hits = {policy: round(hit_rate(cluster), 2) for policy, (cluster, _) in runs.items()}
assert hits == {"round_robin": 0.14, "least_loaded": 0.19, "prefix_aware": 0.40}
uneven = {policy: cluster.most_uneven for policy, (cluster, _) in runs.items()}
assert uneven == {"round_robin": 21, "least_loaded": 6, "prefix_aware": 5}, "equal numbers are not equal loads"

# %% [markdown]
# The same, twice: nothing depends on chance.

# %%
once, twice = (play(documents[:30], 0.6, "prefix_aware")[1] for _ in range(2))
assert [o.tokens for o in once] == [o.tokens for o in twice]

# %% [markdown]
# What is that worth? At half the traffic round robin still keeps fewer promises than prefix-aware routing does at the
# full.

# %%
half = play(documents, 0.3, "round_robin")[1]
assert good(half) == 159 < good(runs["prefix_aware"][1])

# %% [markdown]
# Goodput is what a mean hides: with round robin the median request looks fine.

# %%
outcomes = runs["round_robin"][1]
ttft = [o.ttft for o in outcomes]
show.say(
    f"round robin: TTFT median {percentile(ttft, 0.5):.1f} s, mean {mean(ttft):.1f} s, p90 {percentile(ttft, 0.9):.1f} s"
)
assert percentile(ttft, 0.5) < TTFT < mean(ttft) < percentile(ttft, 0.9)

# %% [markdown]
# ## All follow the prefix
# What if the load counted for nothing? All conversations share one block of 512 tokens. The first decides where all
# of them go.

# %%
with patch.dict(POLICIES, prefix_aware=(0.0, 1.0)):
    followed = play(conversations, 0.6, "prefix_aware")
balanced = play(conversations, 0.6, "prefix_aware")
show.table("conversations", COLUMNS, [row("prefix only", *followed), row("prefix and load", *balanced)])
assert Counter(o.node for o in followed[1]) == {"node0": 80}, "three nodes of four did nothing"
assert hit_rate(followed[0]) > 4 * hit_rate(balanced[0]), "the better hit rate..."
assert (good(followed[1]), good(balanced[1])) == (0, 64), "... and not one good request"
assert sum(r.scheduler.stats().num_preemptions for r in followed[0].replicas.values()) == 21

# %% [markdown]
# ## A hot prefix is copied by spilling over
# 80 people ask about one document of 16 blocks. Faster and faster: how many nodes have it in the end?


# %%
def about_one_document(gap: float, policy: tuple[float, float] = POLICIES["prefix_aware"]):
    trace = [Asked(f"r{i}", i * gap, 16 * BLOCK_SIZE + 100, 100, [*range(16), 1000 + i]) for i in range(80)]
    with patch.dict(POLICIES, prefix_aware=policy):
        cluster, outcomes = play(trace, 1.0, "prefix_aware")
    return sum(replica.holds(trace[0]) == 16 for replica in cluster.replicas.values()), cluster, outcomes


copies, rows = {}, []
for gap in (0.5, 0.3, 0.1, 0.03):
    copies[gap], cluster, outcomes = about_one_document(gap)
    rows.append((gap, copies[gap], cluster.most_uneven, percentile((o.ttft for o in outcomes), 0.9)))
show.table("one hot document", ("seconds between two", "nodes that have it", "most uneven", "TTFT p90"), rows)
assert copies == {0.5: 1, 0.3: 2, 0.1: 4, 0.03: 4}, "nobody ordered a copy: who is sent elsewhere leaves one there"

only_one, cluster, outcomes = about_one_document(0.03, (0.0, 1.0))
assert only_one == 1 and cluster.most_uneven == 80
assert percentile((o.ttft for o in outcomes), 0.9) > 3 * rows[-1][-1], "the one node that has it is the queue"

# %% [markdown]
# ## Four nodes, divided
# One node decodes, three compute prompts (lesson 11). And the other way round.

# %%
rows, kept = [], {}
for num_prefill in (0, 3, 2):
    cluster, outcomes = play(first, 0.3, "prefix_aware", num_prefill=num_prefill)
    name = f"{num_prefill} P and {4 - num_prefill} D" if num_prefill else "four whole nodes"
    every_gap = sum(o.ttft <= TTFT and max(o.gaps, default=0) <= ITL for o in outcomes)
    kept[num_prefill] = good(outcomes), every_gap
    rows.append((*row(name, cluster, outcomes)[2:-2], *kept[num_prefill]))
    rows[-1] = (name, *rows[-1])
show.table("the same four", ("nodes", *COLUMNS[2:6], "good", "good if every gap counts"), rows)
assert kept == {0: (111, 105), 3: (110, 110), 2: (89, 89)}
assert kept[0][0] > kept[3][0] and kept[0][1] < kept[3][1], "which is better depends on what was promised"

# %% [markdown]
# ## Too much traffic
# The documents at their full speed, round robin, are more than four nodes can do. What if a node takes only three
# requests at a time, and the rest is refused at once?

# %%
everybody = play(first, 1.0, "round_robin")[1]
few = play(first, 1.0, "round_robin", most_in_flight=3)[1]
refused = sum(o.failed for o in few)
show.say(f"all admitted: {good(everybody)} good of 120; {refused} refused: {good(few)} good")
assert (good(everybody), refused, good(few)) == (13, 28, 64)

# %% [markdown]
# ## A node dies
# After 30 seconds, for 20. What it had begun to answer fails, the rest is asked again elsewhere, and its cache is lost.

# %%
calm = play(first, 0.4, "prefix_aware")
for number, failed in ((1, 0), (3, 1)):
    cluster, outcomes = play(first, 0.4, "prefix_aware", failures=[(30.0, number, 20.0)])
    assert sum(o.failed for o in outcomes) == failed and all(o.tokens for o in outcomes)
    show.say(f"node{number} dies: {failed} failed, {good(outcomes)} of 120 good (before: {good(calm[1])})")
    assert good(outcomes) + failed <= good(calm[1]) == 110
    away = [o for o in outcomes if 30 < o.at < 50]
    assert len(away) > 20 and f"node{number}" not in {o.node for o in away}

# %% [markdown]
# ## Check yourself
# The questions of the text.

# %%
spread = {policy: Counter(o.node for o in outcomes).values() for policy, (_, outcomes) in runs.items()}
assert set(spread["round_robin"]) == {50} and hits["round_robin"] == 0.14, "1: the counts are equal, the work is not"
assert uneven["round_robin"] > 4 * uneven["prefix_aware"]

load, saved = POLICIES["prefix_aware"]
assert saved / load == 4, "2: a whole prompt saved is worth four requests in flight"

assert hit_rate(followed[0]) > hit_rate(balanced[0]) and good(followed[1]) < good(balanced[1]), "3"
assert good(few) > 4 * good(everybody) and not any(o.within(TTFT, ITL) for o in few if o.failed), "4"
assert load * 5 == 1.25 > saved
assert min(a.num_tokens for a in documents) < 500 and max(a.num_tokens for a in documents) > 100_000
