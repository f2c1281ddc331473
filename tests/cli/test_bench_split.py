"""The clocks that `bench offline --profile` and `bench step` put into the engine: they see everything, and then they go."""

import time
from pathlib import Path
from unittest.mock import patch

import pytest

from nanopd.config import SamplingParams, UserError
from nanopd.engine.llm import LLM
from tests.bench import split
from tests.engine.conftest import tiny_model

__all__ = ["tiny_model"]  # a fixture
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]


@pytest.fixture
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), num_blocks=40, dtype="float32", max_num_seqs=4, check_invariants=True)


def test_parts_add_up_to_the_whole_and_nothing_is_counted_twice():
    now = [0.0]

    def wait(seconds: float) -> None:
        now[0] += seconds

    clocks = split.Split()
    inner = clocks.timed("norms", wait)

    def outer() -> None:
        wait(1)
        inner(2)
        middle()
        wait(4)

    def between() -> None:
        wait(8)
        inner(16)

    middle = clocks.timed("attention", between)
    with patch.object(time, "perf_counter", lambda: now[0]):
        clocks.timed("elementwise", outer)()
    assert clocks.take() == dict.fromkeys(split.PARTS, 0.0) | {"elementwise": 5, "norms": 18, "attention": 8}
    assert sum(clocks.take().values()) == 0


def test_every_part_of_the_engine_has_a_clock_which_changes_no_token_and_is_gone_afterwards(llm: LLM):
    before = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
    with split.watch(llm) as clocks:
        watched = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
    seconds = clocks.take()
    assert watched == before
    assert all(seconds.values()), seconds
    llm.generate(PROMPTS, GREEDY)
    assert not any(clocks.take().values())


def test_steps_decode_as_many_requests_as_long_as_asked_or_say_why_not(llm: LLM):
    with patch.object(llm.core.scheduler, "schedule", wraps=llm.core.scheduler.schedule) as schedule:
        rows = list(split.decode_steps(llm, [1, 3, 4], [20, 160], num_steps=3))
    assert [(row["batch"], row["context"], "skipped" in row) for row in rows] == [
        (1, 20, False),
        (3, 20, False),
        (4, 20, False),
        (1, 160, False),
        (3, 160, False),
        (4, 160, True),
    ]
    assert schedule.call_count == 5 * (1 + 2 + 3)  # a row: the prompts in one step, two to warm up, three that count
    assert all(row[f"{part}_ms"] > 0 for row in rows if "skipped" not in row for part in split.PARTS)
    assert not llm.core.has_unfinished_requests()
    for row in rows:
        assert len(split.line(row).split()) >= 5


@pytest.mark.parametrize("text", ["", "1,", "0", "1,x", "-1", "1.5"])
def test_a_list_of_numbers_is_checked(text: str):
    assert split.numbers("1, 8,32", "--batch") == [1, 8, 32]
    with pytest.raises(UserError, match="--batch is"):
        split.numbers(text, "--batch")
