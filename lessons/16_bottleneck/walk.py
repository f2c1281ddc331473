# %% [markdown]
# # 16 Finding the bottleneck
# A real engine with a tiny model. It computes each token for real; only the time of a step comes from the roofline of
# lesson 15, so that two runs can be compared number by number.

# %%
import cProfile
import tempfile
from pathlib import Path
from random import Random

from nanopd.config import EngineConfig
from nanopd.engine.core import EngineCore
from nanopd.serve.metrics import Metrics
from nanopd.trace.events import Planned
from nanopd_lessons import drive, show
from nanopd_lessons.cluster import percentile
from nanopd_lessons.service import Job, Run, observe, plan_only, real_engine

scratch = tempfile.TemporaryDirectory()
model = drive.tiny_model(Path(scratch.name) / "tiny")


def chat(every_nth_is_long: int = 0, stamped: bool = False, stamp_at_the_end: bool = False) -> list[Job]:
    """24 requests, one each 40 ms: a system prompt of 256 tokens, a question, 30 to 50 tokens of answer."""
    random = Random(1)
    system = [random.randrange(10, 290) for _ in range(256)]
    jobs = []
    for i in range(24):
        is_long = every_nth_is_long and i % every_nth_is_long == every_nth_is_long - 1
        question = [random.randrange(10, 290) for _ in range(1500 if is_long else random.randint(40, 100))]
        stamp = [10 + i]  # what time it is, say
        prompt = [*stamp * stamped, *system, *question, *stamp * stamp_at_the_end]
        jobs.append(Job(f"r{i}", i * 0.04, prompt, random.randint(30, 50)))
    return jobs


# %% [markdown]
# ## Instruments
# What a client feels, and what `/metrics` counts. First a run in which all is well.


# %%
def row(name: str, run: Run) -> tuple:
    s, gaps = run.stats, [1000 * gap for gap in run.gaps]
    hit = s.prefix_cache_hits / s.prefix_cache_queries
    ttft = (1000 * percentile(run.ttft, share) for share in (0.5, 0.99))
    itl = (percentile(gaps, 0.5), percentile(gaps, 0.99), max(gaps))
    return (name, *ttft, *itl, run.most_waiting, s.num_preemptions, hit, s.num_scheduled_tokens)


COLUMNS = (
    "run",
    "TTFT p50",
    "p99",
    "ITL p50",
    "p99",
    "max",
    "most waiting",
    "preemptions",
    "hit rate",
    "tokens computed",
)


def compare(title: str, **runs: Run) -> None:
    show.table(f"{title} (ms)", COLUMNS, [row(name.replace("_", " "), run) for name, run in runs.items()])


well = real_engine(model, chat())
compare("all is well", well=well)
assert well.stats.num_preemptions == well.most_waiting == 0
assert round(well.stats.prefix_cache_hits / well.stats.prefix_cache_queries, 2) == 0.74

metrics = Metrics()
metrics.scheduler = well.stats
page = metrics.text().decode()
show.say("\n".join(line for line in page.splitlines() if line.startswith(("nanopd:prefix", "nanopd:num_pre"))))
assert "nanopd:prefix_cache_hits_total 5888.0" in page

# %% [markdown]
# The scheduler decides without looking at the model's numbers. So its decisions can be studied without one: the same
# plans, the same times.

# %%
without_model = plan_only(chat())
assert without_model.came == well.came and without_model.stats == well.stats

# %% [markdown]
# ## Measure honestly
# The first request of a run finds nothing in the cache. Whoever measures a single one measures the warm-up.

# %%
plans = [line.event for line in well.lines if isinstance(line.event, Planned)]
begun = {}
for plan in plans:
    for name, start, _ in plan.scheduled:
        begun.setdefault(name, start)
assert begun["r0"] == 0 and {begun[name] for name in begun if name != "r0"} == {256}, "found by all but the first"

# %% [markdown]
# ## Service A: "it stutters"
# The same chat, but clients complain: now and then the text stops. The mean gap does not show much.

# %%
a = real_engine(model, chat(every_nth_is_long=6))
compare("service A", well=well, A=a)
mean_gap = 1000 * sum(a.gaps) / len(a.gaps)
p50, p99 = 1000 * percentile(a.gaps, 0.5), 1000 * percentile(a.gaps, 0.99)
show.say(f"gaps of A: p50 {p50:.1f} ms, mean {mean_gap:.1f} ms, p99 {p99:.1f} ms")
assert (round(p50, 1), round(mean_gap, 1), round(p99, 1)) == (8.7, 10.7, 64.4)

# %% [markdown]
# *Queueing?* Nobody waits. *Preemption?* None. What is different in the slow steps? The trace says what was in each.

# %%
assert a.most_waiting == 0 and a.stats.num_preemptions == 0, "two branches of the tree are ruled out"
sizes = [
    (sum(n for *_, n in plan.scheduled), sum(n == 1 for *_, n in plan.scheduled))
    for plan in (line.event for line in a.lines)
    if isinstance(plan, Planned)
]
big = [decodes for tokens, decodes in sizes if tokens > 1000]
show.say(f"{len(big)} steps of {len(sizes)} computed more than 1,000 tokens; beside them, {sum(big)} decodes waited")
slow_gaps = sum(gap > 0.05 for gap in a.gaps)
assert (len(big), len(sizes)) == (4, 117) and slow_gaps == sum(big) == 33, (
    "each slow gap is a decode in the same step as a long prefill"
)

# %% [markdown]
# Hypothesis: decodes wait behind whole prompts. If so, a chunk threshold of 128 must take the slow gaps away, and
# nothing else may help. One change, all else equal.

# %%
cut = real_engine(model, chat(every_nth_is_long=6), long_prefill_token_threshold=128)
other = plan_only(chat(every_nth_is_long=6), num_blocks=4000)
compare("one change each", A=a, threshold_128=cut, twice_the_blocks=other)
assert sum(gap > 0.05 for gap in cut.gaps) == 0 and max(cut.gaps) < 0.02
assert other.came == a.came, "twice the blocks: not one token comes earlier"
assert cut.tokens == a.tokens, "the same answers"
assert percentile(cut.ttft, 0.99) > 1.5 * percentile(a.ttft, 0.99), "the price: long prompts take more steps"

# %% [markdown]
# ## Service B: "since the last release it costs more"
# The same questions, the same answers in length. The first token is later, and far more tokens are computed.

# %%
b = plan_only(chat(stamped=True))
compare("service B", well=well, B=b)
assert b.stats.prefix_cache_hits == 0
assert b.stats.num_scheduled_tokens > 2.9 * well.stats.num_scheduled_tokens

# %% [markdown]
# A hit rate of 0 has at least three causes: the cache is off, the pool is so small that all is evicted, or no two
# prompts begin alike. Each predicts something else.

# %%
bigger = plan_only(chat(stamped=True), num_blocks=20_000)
assert bigger.stats == b.stats, "not evictions: ten times the pool changes nothing"
prompts = [job.prompt for job in chat(stamped=True)]
repeated = plan_only([*chat(stamped=True), Job("again", 2.0, prompts[0], 30)])
assert repeated.stats.prefix_cache_hits > 256, "not off: the very same prompt is found"
assert all(p[0] != prompts[0][0] and list(p[1:257]) == list(prompts[0][1:257]) for p in prompts[1:])
moved = plan_only(chat(stamp_at_the_end=True))
compare("one change each", B=b, ten_times_the_pool=bigger, stamp_at_the_end=moved)
assert moved.stats.prefix_cache_hits == well.stats.prefix_cache_hits == 5888, "the stamp moved behind what is shared"

# %% [markdown]
# ## Service C: "it hangs for a second"
# Sixteen requests, none like another. The operator is proud of a hit rate that nobody expected.


# %%
def essays() -> list[Job]:
    random = Random(2)
    return [
        Job(
            f"r{i}",
            i * 0.02,
            [random.randrange(10, 290) for _ in range(random.randint(150, 250))],
            random.randint(100, 150),
        )
        for i in range(16)
    ]


c, roomy = plan_only(essays(), num_blocks=120), plan_only(essays(), num_blocks=400)
compare("service C, and with a larger pool", C=c, roomy=roomy)
assert (c.stats.num_preemptions, roomy.stats.num_preemptions) == (9, 0)
rates = [round(run.stats.prefix_cache_hits / run.stats.prefix_cache_queries, 2) for run in (c, roomy)]
assert rates == [0.17, 0.0], "who was preempted finds its own blocks again: this hit rate is a symptom, not a success"
wasted = c.stats.num_scheduled_tokens - roomy.stats.num_scheduled_tokens
assert wasted == 1040 and round(wasted / c.stats.num_scheduled_tokens, 2) == 0.17, "computed twice"
assert max(c.gaps) > 0.5 > 20 * max(roomy.gaps)

# %% [markdown]
# More memory is one cure. If there is none: let fewer run at a time. No token is computed twice then. Is it faster?

# %%
fewer = plan_only(essays(), num_blocks=120, max_num_seqs=5)
compare("one change each", C=c, pool_of_400=roomy, five_at_a_time=fewer)
assert fewer.stats.num_preemptions == 0 and fewer.stats.num_scheduled_tokens == roomy.stats.num_scheduled_tokens
assert max(fewer.gaps) < 0.02 and fewer.end > roomy.end, "steady for whoever has begun; the others wait at the door"
assert percentile(fewer.ttft, 0.5) > percentile(c.ttft, 0.5)

# %% [markdown]
# ## Service D: "slow, and nothing to be seen"
# Every decision is as it was: not a line of the trace differs. Then the time is lost outside: on the CPU, between the
# steps. Count function calls instead of seconds: they do not depend on who else uses the machine.

# %%
few = chat()[:3]


def core_calls(num_blocks: int, **options) -> tuple[float, Run, dict[str, int]]:
    core = EngineCore(
        EngineConfig(model=str(model), dtype="float32", num_blocks=num_blocks, max_model_len=512, **options)
    )
    profile = cProfile.Profile()
    run = profile.runcall(observe, core.scheduler, core.step, few)
    in_core = [e for e in profile.getstats() if not isinstance(e.code, str) and "/core/" in e.code.co_filename]
    by_name: dict[str, int] = {}
    for entry in in_core:
        name = entry.code.co_qualname
        by_name[name] = by_name.get(name, 0) + entry.callcount
    return sum(by_name.values()) / run.steps, run, by_name


calls, runs, most_called = {}, {}, {}
for name, num_blocks, checked in (
    ("plain", 100, False),
    ("plain, large pool", 1000, False),
    ("D", 100, True),
    ("D, large pool", 1000, True),
):
    calls[name], runs[name], most_called[name] = core_calls(num_blocks, check_invariants=checked)
show.table("calls of functions in nanopd/core, each step", ("run", "calls"), list(calls.items()))
assert runs["D"].lines == runs["plain"].lines and runs["D"].tokens == runs["plain"].tokens
assert calls["plain"] == calls["plain, large pool"], "a step's work does not grow with the pool"
assert calls["D"] > 3 * calls["plain"] and calls["D, large pool"] > 5 * calls["D"], (
    "D's does: somebody walks over all blocks"
)

# %% [markdown]
# Somebody left `--check-invariants` on. The profile names the function.

# %%
worst = max(most_called["D, large pool"], key=most_called["D, large pool"].get)
show.say(f"called most in D: {worst}")
assert "check_invariants" in worst and not any("check_invariants" in name for name in most_called["plain"])

# %% [markdown]
# ## Check yourself
# The questions of the text.

# %%
gaps = [10] * 99 + [1000]
assert sum(gaps) / 100 == 19.9 and percentile(gaps, 0.5) == percentile(gaps, 0.99) == 10 and max(gaps) == 1000, "1"
assert rates[0] > rates[1] and c.end > roomy.end, "2"
queue = plan_only(chat(), max_num_seqs=2)
assert percentile(queue.gaps, 0.99) <= percentile(well.gaps, 0.99) and percentile(queue.ttft, 0.5) > 50 * percentile(
    well.ttft, 0.5
), "3"
scratch.cleanup()
