"""The scheduler's queues, and who goes from where to where."""

from diagrams.drawing import Picture, Point
from diagrams.runs import names_exist
from nanopd.core.scheduler import Scheduler


def draw() -> Picture:
    """Waiting ones on the left, running ones on the right; heads point to `schedule`."""
    p = Picture(
        "The scheduler's queues",
        "New requests wait in waiting, those not ready in skipped_waiting, which is asked first; schedule moves them "
        "to running, or for this step to step_skipped_waiting; preempted ones go to the front of waiting.",
        "nanopd/core/scheduler.py",
    )
    names_exist(Scheduler, "add_request", "schedule", "_preempt")
    p.text(0, 232, "`add_request`\n(S9)")
    step = p.group(480, 0, 300, 88, "`step_skipped_waiting`: within one step")
    p.cells(660, 38, [("i", "warn")], 40, 34, gap=6)
    skipped = p.group(120, 84, 300, 92, "`skipped_waiting`: asked first")
    p.cells(314, 128, [("e", "warn"), ("d", "warn")], 40, 34, gap=6)
    waiting = p.group(120, 196, 300, 92, "`waiting`")
    p.cells(268, 240, [("h", "plain"), ("g", "plain"), ("f", "plain")], 40, 34, gap=6)
    schedule = p.box(520, 152, "`schedule()`", 130, 60, "accent")
    running = p.group(744, 136, 208, 92, "`running`: served first (S2)")
    p.cells(800, 180, [("c", "c"), ("b", "b"), ("a", "a")], 40, 34, gap=6)
    p.arrow(Point(100, 232), Point(120, 232))
    p.arrow(skipped.r(), schedule.l(0.3), "1st", "-|-", on=0)
    p.arrow(waiting.r(), schedule.l(0.7), "2nd", "-|-", on=0, side="below")
    p.arrow(schedule.r(), running.l(), "S4")
    p.arrow(schedule.t(), step.b((585 - 480) / 300), "not ready: loads, or\nnot known yet (S5)")
    p.arrow(step.l(), skipped.t(), "all, in order, to the front (S6)", "-|", on=0, at=0.5)
    p.arrow(running.b(0.3), waiting.b(0.85), "no block left: `PREEMPTED`, to the front (S3)", "|-|", bend=330)
    p.arrow(running.b(0.7), Point(744 + 0.7 * 208, 276), "")
    p.text(744 + 0.7 * 208, 290, "finished", "middle", "soft")
    return p
