"""The first half of a step: running requests, in order, and who is preempted for whom."""

from diagrams.drawing import Picture
from diagrams.runs import names_exist
from nanopd.core.scheduler import Scheduler


def draw() -> Picture:
    """`_schedule_running` as a flow chart."""
    p = Picture(
        "The running loop",
        "For each running request: how many tokens, are there blocks for them, and if not who is preempted; case A "
        "tries again, case B ends the loop.",
        "Scheduler._schedule_running: S2, S3",
    )
    names_exist(Scheduler, "_schedule_running", "_num_new_tokens", "_preempt")
    running = p.group(0, 20, 230, 96, "`running`, in order (S2)")
    p.cells(30, 62, [("a", "a"), ("b", "b"), ("c", "c")], 50, 36, gap=8)
    least = p.table(
        330,
        0,
        [
            ["num_new_tokens: the least of", ""],
            ["`num_tokens_with_spec - num_computed_tokens`", "what is missing (S1)"],
            ["`long_prefill_token_threshold`", "one chunk, if it is set"],
            ["`max_num_batched_tokens` - planned so far", "the budget that is left"],
            ["`max_model_len - 1 - num_computed_tokens`", "the longest sequence"],
        ],
        (390, 200),
    )
    p.arrow(running.r(), least.l((68) / 140), "next")
    zero = p.box(420, 186, "0 tokens?", 210, 40, "accent")
    p.arrow(least.b((525 - 330) / 590), zero.t())
    p.arrow(zero.l(), running.b(0.8), "yes: go on with the next", "-|", on=0)
    allocate = p.box(420, 272, "`allocate_slots`", 210, 44, "accent")
    p.arrow(zero.b(), allocate.t(), "no")
    plan = p.box(0, 266, "into the plan (S7);\nthe budget gets smaller", 230, 56, "good")
    p.arrow(allocate.l(), plan.r(), "has its blocks")
    p.arrow(plan.t(0.3), running.b(0.3), "next")
    victim = p.box(420, 372, "victim = the last of `running`", 210, 44)
    p.arrow(allocate.b(), victim.t(), "None: too few free")
    preempt = p.box(
        420,
        452,
        "`_preempt`: blocks freed, last first (K6);\n"
        "`num_computed_tokens = 0`; `PREEMPTED`,\n"
        "to the front of `waiting`",
        330,
        82,
        "bad",
        align="start",
    )
    p.arrow(victim.b(), preempt.t(105 / 330))
    case = p.box(810, 465, "is it the\nrequest itself?", 140, 56, "accent")
    p.arrow(preempt.r(), case.l())
    p.arrow(case.t(), allocate.r(), "no: case A,\ntry again", "|-", on=0, side="left")
    end = p.box(810, 570, "the loop ends", 140, 40, "warn")
    p.arrow(case.b(), end.t(), "yes: case B", side="left")
    p.text(
        0,
        572,
        "After any preemption the waiting loop is left out in this step:\n"
        "who was thrown out must not come back past those who stayed (S4).",
        kind="soft",
    )
    return p
