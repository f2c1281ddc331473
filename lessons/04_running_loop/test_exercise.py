"""What exercise 04 is graded by. `nanopd grade 04 FILE`, or `pytest` in this folder for exercise.py."""

from random import Random
from types import ModuleType
from typing import Any
from unittest.mock import patch

from nanopd.core.output import SchedulerOutput
from nanopd.core.scheduler import Scheduler
from nanopd.request import Request
from nanopd_lessons import drive
from nanopd_lessons.grading import case, generate


def scheduler_class(student: ModuleType) -> type[Scheduler]:
    """The real scheduler with the student's running loop. Preemption is the engine's."""

    class Patched(Scheduler):
        def _num_new_tokens(self, request: Request, num_computed: int, budget: int) -> int:
            limits = self.config.long_prefill_token_threshold, self.max_model_len
            return int(student.num_new_tokens(request, num_computed, budget, *limits))

        def _schedule_running(self, output: SchedulerOutput) -> None:
            def allocate(request: Request, num_new: int) -> list[int] | None:
                while (got := self.kv.allocate_slots(request, request.num_computed_tokens, num_new)) is None:
                    victim = self.running.pop()
                    self._preempt(victim)
                    output.preempted_req_ids.add(victim.request_id)
                    if victim is request:
                        return None
                return [block.block_id for block in got]

            limits = self.config.long_prefill_token_threshold, self.max_model_len
            student.schedule_running(self.running, self.config.max_num_batched_tokens, *limits, allocate, output)

    return Patched


def make(student: ModuleType, num_blocks: int, **options: Any) -> Scheduler:
    with patch("nanopd_lessons.drive.Scheduler", scheduler_class(student)):
        return drive.scheduler(num_blocks, **options)


def told(plan: SchedulerOutput) -> dict[str, Any]:
    """A plan as data."""
    return {
        "tokens": list(plan.num_scheduled_tokens.items()),
        "sum": plan.total_num_scheduled_tokens,
        "known": [[c.request_id, c.new_block_ids, c.num_computed_tokens] for c in plan.scheduled_cached_reqs],
        "new": [[n.request_id, n.block_ids, n.num_computed_tokens] for n in plan.scheduled_new_reqs],
        "preempted": sorted(plan.preempted_req_ids),
    }


@case(points=2, hint="Write the four limits down for the request that is named. Which threshold is no limit?")
def test_four_limits(student: ModuleType, random: Random) -> Any:
    """The least of four limits, and never less than zero"""
    seen = {}
    for least in ("missing", "threshold", "no threshold", "budget", "max_model_len", "nothing missing", "too long"):
        n, computed, budget, threshold, longest = random.randint(200, 300), random.randint(0, 50), 1000, 400, 2000
        expect = random.randint(1, 60)
        match least:
            case "threshold":
                threshold = expect
            case "no threshold":
                threshold = 0
            case "budget":
                budget = expect
            case "max_model_len":
                longest = computed + 1 + expect
            case "nothing missing":
                computed = n
            case "too long":
                longest = computed
        got = student.num_new_tokens(drive.request("r", n), computed, budget, threshold, longest)
        limits = {"tokens": n, "computed": computed, "budget": budget, "threshold": threshold, "longest": longest}
        seen[f"the least is: {least}"] = limits | {"new tokens": got}
    return seen


@case(points=2, hint="What does a step have left after the decodes? Do you count down what you give?")
def test_decodes_beside_a_long_prompt(student: ModuleType, random: Random) -> Any:
    """A long prompt beside decodes, until it has its first token"""
    budget, threshold = random.randint(20, 40), random.choice([0, 0, 8, 12])
    options = {"max_num_batched_tokens": budget, "long_prefill_token_threshold": threshold}
    scheduler = make(student, 100, **options)
    for i in range(3):
        scheduler.add_request(drive.request(f"d{i}", random.randint(1, 5), max_tokens=200))
    drive.step(scheduler)
    scheduler.add_request(long := drive.request("long", random.randint(100, 200)))
    plans = []
    while not long.num_output_tokens and len(plans) < 100:
        plans.append(list(drive.step(scheduler).num_scheduled_tokens.items()))
    return {"budget": budget, "threshold": threshold, "plans": plans}


@case(
    points=2, hint="S8: two steps are planned, and the first one's tokens are not there yet. Who has nothing missing?"
)
def test_zero_is_skipped(student: ModuleType, random: Random) -> Any:
    """Whoever gets no token is skipped, and those behind it are not"""
    scheduler = make(student, 100, max_num_batched_tokens=24)
    for name, n in (("a", random.randint(1, 6)), ("b", random.randint(1, 6)), ("long", random.randint(80, 99))):
        scheduler.add_request(drive.request(name, n))
    return [told(scheduler.schedule()) for _ in range(4)]


@case(
    points=2, hint="S7: does the worker learn of each block once? Of the tokens computed before this step, or after it?"
)
def test_what_the_worker_is_told(student: ModuleType, random: Random) -> Any:
    """Known requests: only new blocks, and how far they were before the step"""
    scheduler = make(student, 100, max_num_batched_tokens=32, long_prefill_token_threshold=10)
    for i in range(3):
        scheduler.add_request(drive.request(f"r{i}", random.randint(5, 40), max_tokens=random.randint(2, 9)))
    plans = []
    while scheduler.has_unfinished_requests() and len(plans) < 60:
        plans.append(told(drive.step(scheduler)))
    return plans


@case(points=3, hint="`running` gets shorter while you walk it. Do you still look at requests that are gone?")
def test_preemptions(student: ModuleType, random: Random) -> Any:
    """A pool that is too small: requests disappear from `running` during the loop"""
    scheduler = make(student, 12, max_num_batched_tokens=40, long_prefill_token_threshold=12)
    for i in range(6):
        scheduler.add_request(drive.request(f"r{i}", random.randint(3, 15), max_tokens=random.randint(10, 25)))
    plans = []
    while scheduler.has_unfinished_requests() and len(plans) < 300:
        plans.append(told(drive.step(scheduler)))
    return {"steps": len(plans), "plans": plans, "preemptions": scheduler.stats().num_preemptions}


@case(points=4, hint="Find the first case above that fails: this one is all of them together.", seconds=180)
def test_real_engine(student: ModuleType, random: Random) -> Any:
    """Your loop serves real tokens, in chunks, with a small budget and a small pool"""
    prompts = [[random.randrange(10, 290) for _ in range(random.randint(10, 40))] for _ in range(4)]
    options = {"num_blocks": 8, "max_num_batched_tokens": 24, "long_prefill_token_threshold": 10}
    with patch("nanopd.engine.core.Scheduler", scheduler_class(student)):
        return generate(prompts, max_tokens=12, **options)
