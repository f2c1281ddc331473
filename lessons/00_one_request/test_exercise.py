"""What exercise 00 is graded by. `nanopd grade 00 FILE`, or `pytest` in this folder for exercise.py."""

import tempfile
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

from nanopd_lessons import drive
from nanopd_lessons.grading import case


def tiny_core(**options: Any) -> Any:
    """A real engine core with a tiny random model: what is graded here is the driving."""
    from nanopd.config import EngineConfig
    from nanopd.engine.core import EngineCore

    path = drive.tiny_model(Path(tempfile.mkdtemp()) / "tiny")
    defaults: dict[str, Any] = {"num_blocks": 64, "max_model_len": 128, "attention_backend": "cpu"}
    return EngineCore(EngineConfig(model=str(path), check_invariants=True, **(defaults | options)))


def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """The greedy tokens of each prompt."""
    from nanopd.config import SamplingParams
    from nanopd.request import Request

    core, tokens = tiny_core(), [list[int]() for _ in prompts]
    for i, prompt in enumerate(prompts):
        wish = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=0)
        core.add_request(Request(str(i), prompt, wish))
    while core.has_unfinished_requests():
        for news in core.step():
            tokens[int(news.request_id)] += news.new_token_ids
    return tokens


class Counted:
    """A real engine core; it only counts its steps, and looks at what each of them planned."""

    def __init__(self, **options: Any) -> None:
        self.core = tiny_core(**options)
        self.plans: list[list[str]] = []
        step, schedule = self.core.step, self.core.scheduler.schedule

        def limited() -> Any:
            assert len(self.plans) < 100, "100 steps, and not finished: does `run` end?"
            return step()

        def noted() -> Any:
            plan = schedule()
            self.plans.append(sorted(plan.num_scheduled_tokens))
            return plan

        self.core.step, self.core.scheduler.schedule = limited, noted  # type: ignore[method-assign]

    def seen(self, driver: Any) -> dict[str, Any]:
        answers = {
            number: {"tokens": a.token_ids, "finish reason": a.finish_reason, "problem": a.problem}
            for number, a in enumerate(driver.answers)
        }
        left = list(self.core.scheduler.requests)
        return {"answers": answers, "who was in each step": self.plans, "left in the core": left}


def some_prompt(random: Random) -> list[int]:
    return [random.randrange(10, 290) for _ in range(random.randint(3, 30))]


@case(points=2, hint="Each output token takes one step, and the first step computes the whole prompt.")
def test_one_prompt(student: ModuleType, random: Random) -> Any:
    """One prompt gets its tokens, in as many steps"""
    counted = Counted()
    driver = student.Driver(counted.core)
    prompt, most = some_prompt(random), random.randint(3, 8)
    number = driver.submit(prompt, most)
    submitted = {
        "number": number,
        "steps so far": len(counted.plans),
        "status": counted.core.scheduler.waiting[0].status.name,
    }
    driver.run()
    same = driver.answers[0].token_ids == generate([prompt], most)[0]
    return {"submitted": submitted, "the engine's own tokens": same} | counted.seen(driver)


@case(points=3, hint="Which prompts are in the core while a step runs? Look at `who was in each step` for two prompts.")
def test_several_prompts(student: ModuleType, random: Random) -> Any:
    """Several prompts share the steps, and keep their order whoever ends first"""
    counted = Counted()
    driver = student.Driver(counted.core)
    lengths = random.sample(range(2, 9), 4)
    numbers = [driver.submit(some_prompt(random), most) for most in lengths]
    answers = driver.run()
    order = [[a is b for b in driver.answers].index(True) for a in answers]
    return {"numbers": numbers, "order": order} | counted.seen(driver)


@case(points=2, hint="What does `add_request` do with a prompt that can never fit? And what about the other prompts?")
def test_a_refused_prompt(student: ModuleType, random: Random) -> Any:
    """A prompt that is refused ends with an error, and the others are answered"""
    counted = Counted()
    driver = student.Driver(counted.core)
    prompts = [some_prompt(random), [7] * 200, [], some_prompt(random)]
    numbers = [driver.submit(prompt, 3) for prompt in prompts]
    driver.run()
    return {"numbers": numbers} | counted.seen(driver)


@case(points=3, hint="The core goes on until somebody tells it. And which tokens does the user get to see?")
def test_a_stop_sequence(student: ModuleType, random: Random) -> Any:
    """A stop sequence is cut off, and ends the request in the core in the same step"""
    prompts = [some_prompt(random) for _ in range(2)]
    whole = generate(prompts, 12)
    counted = Counted()
    driver = student.Driver(counted.core)
    at = random.randint(3, 6)
    driver.submit(prompts[0], 12, whole[0][at : at + random.randint(1, 3)])
    driver.submit(prompts[1], 12)
    driver.run()
    return counted.seen(driver)


@case(
    points=3,
    hint="The sequence may have begun in the prompt, or be as long as all there is. What may it be compared with?",
)
def test_where_a_stop_sequence_counts(student: ModuleType, random: Random) -> Any:
    """A stop sequence counts in the output only: not in the prompt, not across its end, but at the very first token"""
    prompt = some_prompt(random)
    first, second, *_, last = generate([prompt], 8)[0]
    counted = Counted()
    driver = student.Driver(counted.core)
    for stop in ([prompt[-1], first], prompt[-2:], [first], [first, second], [299, 298, 297], [last]):
        driver.submit(prompt, 8, stop)
    driver.run()
    return counted.seen(driver)


@case(points=2, hint="After a cancel nobody should work for it any more. And can one cancel what is over?")
def test_cancel(student: ModuleType, random: Random) -> Any:
    """A cancelled answer keeps what it has, and takes no more steps"""
    counted = Counted()
    driver = student.Driver(counted.core)
    for most in (6, 6, 1):
        driver.submit(some_prompt(random), most)
    for _ in range(random.randint(1, 3)):
        driver.step()
    driver.cancel(1)
    driver.cancel(1)
    driver.cancel(2)
    driver.run()
    return counted.seen(driver)


@case(
    points=3,
    hint="`step` may bring news of nobody, and news of one request only. Go by the ids, not by the order.",
    seconds=60,
)
def test_a_crowded_engine(student: ModuleType, random: Random) -> Any:
    """In a small pool, with chunks and preemptions, everybody still gets the right tokens"""
    prompts = [[random.randrange(10, 290) for _ in range(random.randint(20, 60))] for _ in range(5)]
    whole = generate(prompts, 14)
    counted = Counted(num_blocks=9, max_num_batched_tokens=16, max_num_seqs=3)
    driver = student.Driver(counted.core)
    for number, prompt in enumerate(prompts):
        driver.submit(prompt, 14, whole[number][9:11] if number % 2 else ())
    driver.run()
    return counted.seen(driver) | {"preemptions": counted.core.scheduler.stats().num_preemptions}
