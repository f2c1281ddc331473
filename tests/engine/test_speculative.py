"""Speculative decoding changes no token: however the work is cut up, whatever is asked for, wrong drafts or right ones."""

import itertools
import random
from array import array
from pathlib import Path
from typing import Any

import pytest

from nanopd import LLM, SamplingParams
from tests.engine.conftest import VOCAB_SIZE

Answers = list[tuple[Any, ...]]


def prompts(n: int = 6) -> list[list[int]]:
    """Some repeat themselves, so that there is something to look up at once."""
    rng = random.Random(3)
    made = [[rng.randrange(200) for _ in range(rng.randint(2, 12))] * rng.randint(1, 4) for _ in range(n)]
    return [*made, made[0] + [5, 6]]


def generate(model: Path, params: SamplingParams, **options: Any) -> tuple[Answers, LLM]:
    defaults: dict[str, Any] = {"num_blocks": 200, "max_model_len": 200}
    llm = LLM(str(model), dtype="float32", check_invariants=True, **defaults | options)
    outputs = [output.outputs[0] for output in llm.generate(prompts(), params)]
    assert llm.core.scheduler.kv.pool.num_free_blocks == len(llm.core.scheduler.kv.pool.blocks)
    return [(o.token_ids, o.text, o.finish_reason, o.stop_reason, o.logprobs) for o in outputs], llm


def tokens(answers: Answers) -> list[list[int]]:
    return [answer[0] for answer in answers]


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A drafter that knows the answers, and is often wrong at the second, third … token of what it says."""
    known: list[list[int]] = []
    rng = random.Random(0)

    def propose(token_ids: "array[int]", most: int) -> list[int]:
        so_far = token_ids.tolist()
        whole = next((text for text in known if text[: len(so_far)] == so_far), [])  # none: a stop string has ended it
        draft = whole[len(so_far) :][: max(0, most)]
        if draft and rng.random() < 0.5:
            at = rng.randrange(len(draft))
            draft[at] = (draft[at] + 1) % VOCAB_SIZE
        return draft

    monkeypatch.setattr("nanopd.core.scheduler.propose", propose)

    def learn(answers: Answers) -> None:
        known[:] = [prompt + answer for prompt, answer in zip(prompts(), tokens(answers))]

    return learn


CUTS: tuple[dict[str, Any], ...] = (
    {},
    {"long_prefill_token_threshold": 3},
    {"max_num_batched_tokens": 9},
    {"num_blocks": 14, "block_size": 4, "max_model_len": 56},
    {"num_blocks": 14, "block_size": 4, "max_model_len": 56, "enable_prefix_caching": False},
    {"max_num_seqs": 2, "enable_prefix_caching": False},
)
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_greedy_answers_are_the_same(tiny_model: Path, oracle: Any, cut: dict[str, Any]):
    plain, _ = generate(tiny_model, GREEDY, **cut)
    oracle(plain)
    for k in range(1, 6):
        answers, llm = generate(tiny_model, GREEDY, **cut, speculative_ngram=k)
        stats = llm.stats()
        assert tokens(answers) == tokens(plain), f"{k} drafts"
        assert 0 < stats.spec_decode_num_accepted_tokens < stats.spec_decode_num_draft_tokens
        assert ("num_blocks" in cut) <= (stats.num_preemptions > 0)


WISHES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.9, "seed": 11},
    {"temperature": 1.3, "seed": 5, "top_p": 0.9, "top_k": 50},
    {"temperature": 0.8, "seed": 7, "presence_penalty": 1.0, "frequency_penalty": -1.5, "repetition_penalty": 0.8},
    {"temperature": 0, "frequency_penalty": -2.0, "repetition_penalty": 0.5},
    {"temperature": 0.9, "seed": 3, "logprobs": 3},
    {"temperature": 0.9, "seed": 4, "ignore_eos": False, "stop_token_ids": list(range(0, 300, 7)), "min_tokens": 9},
    {"temperature": 0.9, "seed": 4, "stop": ["a", "e", "\x10", "0"], "min_tokens": 4, "logprobs": 0},
    {"temperature": 0.9, "seed": 4, "max_tokens": 1},
    {"temperature": 0.9, "seed": 4, "max_tokens": 2},
)


@pytest.mark.parametrize("wish", WISHES, ids=str)
@pytest.mark.parametrize("drafter", ["oracle", "ngram"])
def test_seeds_penalties_stops_and_logprobs_are_the_same(
    tiny_model: Path, request: pytest.FixtureRequest, wish: dict[str, Any], drafter: str
):
    params = SamplingParams(**{"max_tokens": 40, "ignore_eos": True} | wish)
    plain, _ = generate(tiny_model, params)
    if drafter == "oracle":
        request.getfixturevalue("oracle")(plain)
    answers, llm = generate(tiny_model, params, speculative_ngram=4)
    if params.max_tokens > 2 and drafter == "oracle":
        assert llm.stats().spec_decode_num_accepted_tokens > 0
    for (*told, logprobs), (*expected, expected_logprobs) in zip(answers, plain):
        assert told == expected
        assert [[*top] for top in logprobs or ()] == [[*top] for top in expected_logprobs or ()]
        for top, other in zip(logprobs or (), expected_logprobs or ()):
            assert [p.rank for p in top.values()] == [p.rank for p in other.values()]
            assert [p.logprob for p in top.values()] == pytest.approx([p.logprob for p in other.values()], abs=1e-4)


def test_a_repetition_takes_fewer_steps(tiny_model: Path):
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, repetition_penalty=0.05)
    steps = {}
    for k in (0, 4):
        llm = LLM(str(tiny_model), dtype="float32", num_blocks=50, max_model_len=200, speculative_ngram=k)
        output = llm.add_request([1, 2, 3], params)
        for steps[k] in itertools.count(1):
            llm.step()
            if output.finished:
                break
    metrics = output.metrics.as_dict(60)
    assert steps[0] == 60
    assert steps[4] == 60 - metrics["num_accepted_tokens"] < 40
    assert metrics["num_accepted_tokens"] <= metrics["num_draft_tokens"]
