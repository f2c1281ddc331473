"""What exercise 16 is graded by. `nanopd grade 16 FILE`, or `pytest` in this folder for exercise.py."""

import tempfile
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

from nanopd.trace.events import Arrived, Moved, Planned, Sampled
from nanopd.trace.file import Line
from nanopd_lessons import drive
from nanopd_lessons.grading import case, generate
from nanopd_lessons.service import Job, Run, plan_only, real_engine

assert generate  # the grader loads torch once for all cases


def chat(random: Random, long: int = 0, stamped: bool = False) -> list[Job]:
    """A system prompt and questions; every so manieth is long; or a stamp stands before everything."""
    system, jobs = [random.randrange(10, 290) for _ in range(256)], []
    for i in range(22):
        is_long = long and i % long == long - 1
        question = [random.randrange(10, 290) for _ in range(1500 if is_long else random.randint(40, 100))]
        jobs.append(Job(f"r{i}", i * 0.04, [*[10 + i] * stamped, *system, *question], random.randint(30, 50)))
    return jobs


def essays(random: Random) -> list[Job]:
    """Requests of which none is like another."""
    return [
        Job(f"r{i}", i * 0.02, [random.randrange(10, 290) for _ in range(random.randint(150, 250))], 150)
        for i in range(16)
    ]


def service(trouble: str, random: Random) -> Run:
    """A service with one planted problem."""
    if trouble == "preemption":
        return plan_only(essays(random), num_blocks=random.randint(110, 130))
    if trouble == "queue":
        return plan_only(chat(random), max_num_seqs=random.randint(2, 4))
    return plan_only(chat(random, long=random.randint(4, 7) if trouble == "prefill" else 0, stamped=trouble == "cache"))


@case(
    points=1, hint="Which event has the tokens of a step, and whose are they? A request's list begins with its arrival."
)
def test_token_times(student: ModuleType, random: Random) -> Any:
    """Arrival and token times of all requests"""
    run = plan_only(chat(random)[:6])
    return {"times": student.token_times(run.lines)}


@case(points=1, hint="Sort, and count from the left: how many values must be at or below the one you take?")
def test_percentile(student: ModuleType, random: Random) -> Any:
    """Percentiles by nearest rank, of few values and of many"""
    small = [30, 10, 20, 40]
    many = [random.random() for _ in range(random.randint(90, 250))]
    shares = (0.01, 0.25, 0.5, 0.51, 0.9, 0.99, 1.0)
    return {f"of {len(v)}": [student.percentile(v, share) for share in shares] for v in (small, many, [7.0])}


@case(
    points=2,
    hint="Remember for each request how far it had ever been planned. A hit after a preemption is not computed again.",
)
def test_recomputed(student: ModuleType, random: Random) -> Any:
    """Tokens that were computed again, after preemptions, with and without a prefix cache"""
    jobs, num_blocks = essays(random), random.randint(90, 130)
    runs = {
        f"cache {on}": plan_only(jobs, num_blocks, enable_prefix_caching=on, max_num_batched_tokens=100)
        for on in (True, False)
    }
    by_hand = [
        Planned([("a", 0, 10)]),
        Planned([("a", 10, 5), ("b", 0, 4)]),
        Planned([("a", 8, 10)]),
        Planned([("a", 2, 3), ("b", 4, 1)]),
        Planned([("a", 5, 15)]),
    ]
    found = {name: student.recomputed_share(run.lines) for name, run in runs.items()}
    return found | {"by hand": student.recomputed_share([Line(float(i), i, e) for i, e in enumerate(by_hand)])}


@case(points=2, hint="What does a preempted request find when it comes back, and should the cache be praised for it?")
def test_hit_rate(student: ModuleType, random: Random) -> Any:
    """The hit rate counts each request once"""
    runs = {"shared": plan_only(chat(random)), "essays": plan_only(essays(random), num_blocks=random.randint(100, 120))}
    by_hand = [Arrived("a", [1] * 20, 5), Arrived("b", [2] * 30, 5), Moved("a", "running", 16), Sampled({"a": [1]})]
    by_hand += [Moved("a", "preempted"), Moved("a", "running", 16)]
    found = {name: student.hit_rate(run.lines) for name, run in runs.items()}
    return found | {"by hand": student.hit_rate([Line(float(i), i, e) for i, e in enumerate(by_hand)])}


@case(
    points=4,
    hint="Print the four numbers for each kind of service in the lesson's script, and look where they differ.",
    seconds=60,
)
def test_diagnose(student: ModuleType, random: Random) -> Any:
    """Eight services with a problem chosen at random"""
    troubles = [
        "preemption",
        "cache",
        "queue",
        "prefill",
        "well",
        *random.choices(["preemption", "cache", "queue", "prefill"], k=3),
    ]
    random.shuffle(troubles)
    return [student.diagnose(service(trouble, random).lines) for trouble in troubles]


@case(
    points=3,
    hint="The same as before, with a model. Which of your functions reads more into an event than it says?",
    seconds=90,
)
def test_real_engine(student: ModuleType, random: Random) -> Any:
    """The trace of a real engine that computes real tokens, well and with a problem"""
    trouble = random.choice(["cache", "prefill", "preemption"])
    jobs = essays(random) if trouble == "preemption" else chat(random, 5 * (trouble == "prefill"), trouble == "cache")
    blocks = 120 if trouble == "preemption" else 1000
    tiny = drive.tiny_model(Path(tempfile.mkdtemp()) / "tiny")
    run = real_engine(tiny, jobs, num_blocks=blocks, max_model_len=1900)
    return {
        "diagnosis": student.diagnose(run.lines),
        "hit rate": student.hit_rate(run.lines),
        "recomputed": student.recomputed_share(run.lines),
        "tokens": {name: len(times) - 1 for name, times in student.token_times(run.lines).items()},
    }
