"""The second half of a step: who is admitted, and who waits for data from elsewhere."""

from diagrams.drawing import Picture
from diagrams.runs import names_exist
from nanopd.core.scheduler import Scheduler


def draw() -> Picture:
    """`_schedule_waiting` as a flow chart; what ends in the transit queue is yellow."""
    p = Picture(
        "The waiting loop",
        "For the head of the queue: is its grammar or its remote data there, what is computed already here or elsewhere, "
        "does it load asynchronously, does it get blocks. Who is not ready goes to step_skipped_waiting; without blocks, "
        "also for what is to be loaded, the loop ends.",
        "Scheduler._schedule_waiting: S4, S5, S6",
    )
    names_exist(Scheduler, "_schedule_waiting", "_try_promote")
    x, w = 350, 300
    head = p.box(x, 0, "head of `skipped_waiting`,\nelse of `waiting`", w, 56, "plain")
    p.text(
        0,
        18,
        "Only if nobody was preempted in\nthis step, while `max_num_seqs`\nand the budget allow (S4).",
        kind="soft",
    )
    loads = p.box(x, 96, "status in `BLOCKED`: waits for\nremote KVs, or for its grammar?", w, 56, "accent")
    local = p.box(x, 190, "`get_computed_blocks`\nlocal hit: a prefix of its blocks", w, 56)
    remote = p.box(x, 292, "`get_num_new_matched_tokens`\nremote hit: computed elsewhere", w, 56)
    load = p.box(x, 394, "remote hit, loaded asynchronously?", w, 40, "accent")
    some = p.box(x, 478, "`num_new_tokens`, as for the running\n`allocate_slots`", w, 56)
    run = p.box(x, 590, "`RUNNING`, at the end of `running`;\nall its data into the plan (S7)", w, 56, "good")
    p.arrow(head.b(), loads.t())
    p.arrow(loads.b(), local.t(), "no")
    p.arrow(local.b(), remote.t())
    p.arrow(remote.b(), load.t(), "so many tokens")
    p.arrow(load.b(), some.t(), "no")
    p.arrow(some.b(), run.t(), "has its blocks")
    promote = p.box(
        0, 98, "`_try_promote`: id in\n`finished_recving_kv_req_ids`, or\nout of `compiling` (S12)?", 262, 66, "accent"
    )
    p.arrow(loads.l(0.5), promote.r((124 - 98) / 66), "yes")
    later = p.box(40, 224, "`step_skipped_waiting`", 222, 36, "warn")
    p.arrow(promote.b(0.6), later.t((262 * 0.6 - 40) / 222), "no")
    ready = p.box(
        40,
        300,
        "remote KVs: into the hash table\n(K8); if all came, the last token\nis computed again. `WAITING`",
        222,
        78,
    )
    p.arrow(promote.b(0.06), ready.l(), "yes", "|-", on=0, at=0.25)
    p.arrow(ready.b(), some.l(), "holds blocks,\nmay need one more", "|-", on=1, side="below", at=0.3)
    p.arrow(ready.r(0.3), local.l(), "holds\nnone", "-|-", bend=306, on=1, at=0.6)
    unknown = p.box(730, 302, "`step_skipped_waiting`", 222, 36, "warn")
    p.arrow(remote.r(), unknown.l(), "not yet")
    reserve = p.box(730, 376, "no tokens in this step\n`allocate_slots`,\n`delay_caching=True` (K8)", 222, 76)
    p.arrow(load.r(), reserve.l(0.5), "yes")
    wait = p.box(754, 496, "`WAITING_FOR_REMOTE_KVS`\n`step_skipped_waiting`\n(S5)", 198, 76, "warn")
    p.arrow(reserve.b((858 - 730) / 222), wait.t(104 / 198), "has its blocks", side="left")
    end = p.box(730, 606, "the loop ends:\nnobody overtakes (S4)", 222, 56, "bad")
    p.arrow(reserve.b(14 / 222), end.t(14 / 222), "None", side="left", at=0.75)
    p.arrow(some.r(), end.l(), "None", "-|-", bend=690, on=0)
    p.text(
        0,
        600,
        "At the end of the step all of\n`step_skipped_waiting` goes to the front\nof `skipped_waiting` (S6).",
        kind="soft",
    )
    return p
