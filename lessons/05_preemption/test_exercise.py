"""What exercise 05 is graded by. `nanopd grade 05 FILE`, or `pytest` in this folder for exercise.py."""

from random import Random
from types import ModuleType
from typing import Any
from unittest.mock import patch

from nanopd.core.output import SchedulerOutput
from nanopd.core.scheduler import Scheduler
from nanopd.request import Request
from nanopd_lessons import drive
from nanopd_lessons.grading import case, generate


def scheduler_class(student: ModuleType, preemptions: list[list[str]], own_loop: bool = True) -> type[Scheduler]:
    """The real scheduler with the student's functions; it writes down who was preempted, by which rule, for whom.
    `own_loop`: False if only `preempt` is the student's, and the running loop the engine's."""

    class Patched(Scheduler):
        def _schedule_running(self, output: SchedulerOutput) -> None:
            if not own_loop:
                super()._schedule_running(output)
                return
            student.schedule_running(self, output)
            for known in output.scheduled_cached_reqs:
                for block_id in known.new_block_ids:
                    if not isinstance(block_id, int):
                        what = f"ids expected, got {type(block_id).__name__}"
                        raise TypeError(f"new blocks of request {known.request_id} in its CachedRequestData: {what}")

        def _preempt(self, request: Request, rule: str = "", by: str = "") -> None:
            preemptions.append([request.request_id, rule, by])
            self._num_preemptions += 1
            student.preempt(self, request)

    return Patched


def make(
    student: ModuleType, num_blocks: int, own_loop: bool = True, **options: Any
) -> tuple[Scheduler, list[list[str]]]:
    preemptions: list[list[str]] = []
    with patch("nanopd_lessons.drive.Scheduler", scheduler_class(student, preemptions, own_loop)):
        return drive.scheduler(num_blocks, **options), preemptions


def books(scheduler: Scheduler) -> dict[str, Any]:
    """Who stands where, how far, with which blocks; and the free queue."""
    names = ("running", "waiting")
    queues = {
        name: [
            [r.request_id, r.status.value, r.num_computed_tokens, r.metrics.num_preemptions]
            for r in getattr(scheduler, name)
        ]
        for name in names
    }
    tables = {i: scheduler.kv.get_block_ids(i) for i in scheduler.kv.tables}
    return queues | {"blocks": tables, "free queue": [b.block_id for b in scheduler.kv.pool.free_queue.in_order()]}


def told(plan: SchedulerOutput) -> dict[str, Any]:
    return {
        "tokens": list(plan.num_scheduled_tokens.items()),
        "sum": plan.total_num_scheduled_tokens,
        "known": [[c.request_id, c.new_block_ids, c.num_computed_tokens] for c in plan.scheduled_cached_reqs],
        "preempted": sorted(plan.preempted_req_ids),
    }


def steps(scheduler: Scheduler, most: int) -> list[dict[str, Any]]:
    """At most so many steps: the plan and the books of each."""
    seen = []
    while scheduler.has_unfinished_requests() and len(seen) < most:
        plan = drive.step(scheduler)
        seen.append({"plan": told(plan), "afterwards": books(scheduler)})
    return seen


@case(points=2, hint="Five things change in a preemption. Compare each with what is shown. Whose turn is it next?")
def test_books(student: ModuleType, random: Random) -> Any:
    """`preempt` by itself, called by us and by the engine's own loop"""
    scheduler, _ = make(student, 20, own_loop=False, max_num_seqs=2)
    for i in range(3):
        scheduler.add_request(drive.request(f"r{i}", random.randint(5, 12), max_tokens=30))
    scheduler.schedule()
    student.preempt(scheduler, scheduler.running.pop())
    seen = {"called once": books(scheduler)}
    scheduler, preemptions = make(student, 9, own_loop=False)
    for name in "ABC":
        scheduler.add_request(drive.request(name, random.randint(9, 12), max_tokens=12))
    return seen | {"in the engine's loop": steps(scheduler, 40), "preemptions": preemptions}


@case(points=2, hint="The walk of lesson 05, step 4: who wants a block, who gives it, and who tries again?")
def test_case_a(student: ModuleType, random: Random) -> Any:
    """Case A: a later request gives its blocks, and the one in need tries again"""
    n = 4 * random.randint(2, 4)
    scheduler, preemptions = make(student, n // 4 * 2 + 2)
    for name, prompt in (("A", n - 1), ("B", n), ("C", random.randint(5, 8))):
        scheduler.add_request(drive.request(name, prompt, max_tokens=4))
    return {"steps": steps(scheduler, 3), "preemptions": preemptions}


@case(
    points=2, hint="The walk of lesson 05, step 8: the last of `running` is the request itself. What may the others do?"
)
def test_case_b(student: ModuleType, random: Random) -> Any:
    """Case B: the request itself is the last, goes, and ends the loop"""
    n = 4 * random.randint(1, 4)
    scheduler, preemptions = make(student, n // 4 * 2)
    for name, prompt in (("A", n - 2), ("B", n)):
        scheduler.add_request(drive.request(name, prompt, max_tokens=3))
    return {"steps": steps(scheduler, 3), "preemptions": preemptions}


@case(points=3, hint="A chunk may need more blocks than one victim has. And after all victims it may still be too few.")
def test_more_than_one_victim(student: ModuleType, random: Random) -> Any:
    """A chunk that needs several blocks: several victims, or at last the request itself"""
    seen = {}
    for name, length in (("enough", 24), ("not enough", 40)):
        scheduler, preemptions = make(student, 10, max_num_batched_tokens=40, long_prefill_token_threshold=12)
        first = random.randint(9, 12)
        scheduler.add_request(drive.request("A", first, max_tokens=9))
        scheduler.add_request(drive.request("B", length - random.randint(1, 3), max_tokens=2))
        for i in range(3):
            scheduler.add_request(drive.request(f"small{i}", random.randint(1, 3), max_tokens=9))
        seen[name] = {"steps": steps(scheduler, 5), "preemptions": preemptions}
    return seen


@case(points=3, hint="`drive.step` checks rule K10 after each step. Which step is the first that differs, and in what?")
def test_under_load(student: ModuleType, random: Random) -> Any:
    """150 random steps in a pool that is too small"""
    scheduler, preemptions = make(student, 16, max_num_batched_tokens=30, long_prefill_token_threshold=10)
    number, plans = 0, []
    for _ in range(150):
        if random.random() < 0.3:
            number += 1
            scheduler.add_request(drive.request(f"r{number}", random.randint(1, 30), max_tokens=random.randint(1, 20)))
        if scheduler.has_unfinished_requests():
            plans.append(told(drive.step(scheduler)))
    drive.run(scheduler)
    stats = scheduler.stats()
    return {"plans": plans, "preemptions": preemptions, "computed": stats.num_scheduled_tokens} | books(scheduler)


@case(
    points=4,
    hint="The worker forgets a request only if it is told that it was preempted. Do the cases above pass?",
    seconds=180,
)
def test_real_engine(student: ModuleType, random: Random) -> Any:
    """Real tokens from a pool that is too small, and the same ones as from a large pool"""
    # Blocks of 16. The second needs its third block first: case A. Its fourth it needs when it is the last: case B.
    lengths = random.randint(24, 26), random.randint(29, 31), random.randint(17, 22)
    prompts = [[random.randrange(10, 290) for _ in range(length)] for length in lengths]
    seen = {}
    for name, num_blocks in (("large pool", 20), ("small pool", 6)):
        preemptions: list[list[str]] = []
        with patch("nanopd.engine.core.Scheduler", scheduler_class(student, preemptions)):
            seen[name] = generate(prompts, max_tokens=24, num_blocks=num_blocks, max_num_batched_tokens=64)
        seen[name]["who, why, for whom"] = preemptions
    same = seen["large pool"]["tokens"] == seen["small pool"]["tokens"]
    return seen | {"the same tokens": same}
