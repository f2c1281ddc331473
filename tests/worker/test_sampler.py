"""The sampler against plain numpy, and against the promises of SamplingParams."""

from copy import copy
from functools import cache

import numpy as np
import pytest
import torch

from nanopd.config import SamplingParams
from nanopd.worker.sampler import SamplingRow, sample, uniform, verify

VOCAB = 50


@cache
def checked(**params: object) -> SamplingParams:
    return SamplingParams(**params)  # type: ignore[arg-type]


def row(
    tokens: tuple[int, ...] = (), prompt: tuple[int, ...] = (1, 2), stop_ids: tuple[int, ...] = (), seed: int = 0,
    **params: object,
) -> SamplingRow:  # fmt: skip
    one = copy(checked(**{"temperature": 1.0, "max_tokens": 1000} | params))
    object.__setattr__(one, "seed", seed)  # to check each of 20,000 anew would be most of the time of these tests
    ids = np.array([*prompt, *tokens], dtype=np.int64)
    return SamplingRow(one, ids, len(prompt), frozenset(stop_ids))


def logits(n: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def draw_many(x: torch.Tensor, n: int = 4000, **params: object) -> np.ndarray:
    """How often each token is drawn from one row of logits, with n different seeds."""
    rows = [row(seed=i, **params) for i in range(n)]
    tokens, _ = sample(x.expand(n, -1).clone(), rows)
    return np.bincount(tokens, minlength=VOCAB) / n


def test_greedy_takes_the_best():
    x = logits(8)
    assert sample(x.clone(), [row(temperature=0)] * 8)[0] == x.argmax(-1).tolist()
    assert sample(x.clone(), [row(temperature=1e-6)] * 8)[0] == x.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float):
    x = logits()
    expected = (x[0] / temperature).softmax(-1).double().numpy()
    n = 20_000
    seen = draw_many(x, n, temperature=temperature) * n
    likely = expected * n > 5
    chi_square = (((seen - expected * n) ** 2 / (expected * n))[likely]).sum()
    assert chi_square < likely.sum() + 5 * np.sqrt(2 * likely.sum()), chi_square


def expected_cut(x: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    """Which tokens may come, written the slow way."""
    probs = x[0].softmax(-1).double().numpy()
    keep = [i for i in np.argsort(-probs) if probs[i] >= min_p * probs.max()]
    keep = keep[: top_k or VOCAB]
    left, total, before = [], sum(probs[keep]), 0.0
    for i in keep:
        if before / total < top_p:
            left.append(int(i))
        before += probs[i]
    return set(left)


@pytest.mark.parametrize(
    "cut",
    [
        {"top_k": 5},
        {"top_k": 1},
        {"top_p": 0.6},
        {"top_p": 0.01},
        {"min_p": 0.2},
        {"top_k": 8, "top_p": 0.7, "min_p": 0.05},
    ],
)
def test_cuts_keep_the_right_tokens_in_the_right_shares(cut: dict[str, float]):
    x = logits()
    allowed = expected_cut(x, **cut)  # type: ignore[arg-type]
    seen = draw_many(x, **cut)
    assert set(np.flatnonzero(seen)) <= allowed
    probs = x[0].softmax(-1).numpy()
    mass = sum(probs[i] for i in allowed)
    for i in allowed:
        assert seen[i] == pytest.approx(probs[i] / mass, abs=0.03)


def test_same_seed_same_token_whatever_the_batch():
    x = logits(6)
    rows = [
        row(seed=5, tokens=(3,) * i, **p)
        for i, p in enumerate([{}, {"top_p": 0.9}, {"top_k": 4}, {}, {"min_p": 0.1}, {}])
    ]
    alone = [sample(x[i : i + 1].clone(), [rows[i]])[0][0] for i in range(6)]
    assert sample(x.clone(), rows)[0] == alone
    order = [4, 2, 0, 5, 1, 3]
    assert sample(x[order].clone(), [rows[i] for i in order])[0] == [alone[i] for i in order]


def test_the_uniform_number_depends_on_seed_and_position_alone():
    assert uniform(1, 2) == uniform(1, 2)
    numbers = [uniform(seed, position) for seed in range(-50, 50) for position in range(20)]
    assert len(set(numbers)) == len(numbers)
    assert min(numbers) >= 0
    assert max(numbers) < 1
    assert np.mean(numbers) == pytest.approx(0.5, abs=0.03)


def test_a_token_of_probability_zero_never_comes():
    x = torch.full((1, VOCAB), -torch.inf)
    x[0, [0, 7, VOCAB - 1]] = 0.0
    assert set(np.flatnonzero(draw_many(x, 500))) == {0, 7, VOCAB - 1}


def test_penalties():
    x = torch.tensor([[2.0, -2.0, 1.0, 0.5] + [-9.0] * (VOCAB - 4)])
    context = {"prompt": (0, 1), "tokens": (2, 2, 3)}
    base = row(temperature=0, logprobs=None, **context)  # type: ignore[arg-type]
    assert sample(x.clone(), [base])[0] == [0]
    # repetition 4: 2/4 = 0.5, -2*4 = -8, 1/4, 0.5/4 -> still token 0; frequency 0.5 lowers output tokens only
    assert sample(x.clone(), [row(temperature=0, repetition_penalty=4.0, **context)])[0] == [0]  # type: ignore[arg-type]
    y = x.clone()
    y[0, 4] = 0.4
    assert sample(y.clone(), [row(temperature=0, repetition_penalty=6.0, **context)])[0] == [4]  # type: ignore[arg-type]
    z = torch.tensor([[0.0, 0.0, 1.0, 0.9] + [-9.0] * (VOCAB - 4)])
    assert sample(z.clone(), [row(temperature=0, frequency_penalty=0.2, **context)])[0] == [3], "1 - 2*0.2 < 0.9 - 0.2"  # type: ignore[arg-type]
    assert sample(z.clone(), [row(temperature=0, presence_penalty=0.2, **context)])[0] == [2], "both lose the same"  # type: ignore[arg-type]
    mixed = sample(z.expand(2, -1).clone(), [row(temperature=0), row(temperature=0, frequency_penalty=0.2, **context)])[
        0
    ]  # type: ignore[arg-type]
    assert mixed == [2, 3], "a batch mate's penalty is its own"


def test_min_tokens_forbids_the_end():
    x = torch.zeros(1, VOCAB)
    x[0, 9] = 5.0
    assert sample(x.clone(), [row(temperature=0, min_tokens=2, tokens=(4,), stop_ids=(9,))])[0] != [9]
    assert sample(x.clone(), [row(temperature=0, min_tokens=2, tokens=(4, 4), stop_ids=(9,))])[0] == [9]


def test_logprobs_are_of_the_raw_logits():
    x = logits(3)
    rows = [
        row(temperature=0, logprobs=3),
        row(temperature=0),
        row(temperature=0, logprobs=0, presence_penalty=2.0, tokens=(4,)),
    ]
    tokens, logprobs = sample(x.clone(), rows)
    expected = x.log_softmax(-1)
    assert logprobs[1] is None
    assert logprobs[0] is not None
    assert logprobs[2] is not None
    assert logprobs[0].logprob == pytest.approx(float(expected[0, tokens[0]]))
    assert (logprobs[0].rank, [t for t, _ in logprobs[0].top]) == (1, x[0].topk(3).indices.tolist())
    assert logprobs[2].top == []
    assert logprobs[2].logprob == pytest.approx(float(expected[2, tokens[2]]))


# ------------------------------------------------------------------ drafts


def test_samples_hold_up_to_the_first_that_differs_from_the_draft():
    assert verify([5, 6, 7], [5, 6]) == [5, 6, 7], "all right, and one token more"
    assert verify([5, 9, 7], [5, 6]) == [5, 9]
    assert verify([9, 6, 7], [5, 6]) == [9], "what comes after a wrong one was sampled in vain"
    assert verify([5], []) == [5]


def answers(chain: torch.Tensor, draft: list[int], seeds: range, **params: object) -> list[tuple[int, ...]]:
    """For each seed the first two tokens of a model whose logits are the row of `chain` of the last token; 0 begins."""
    got: list[list[int]] = [[] for _ in seeds]
    while todo := [i for i, tokens in enumerate(got) if len(tokens) < 2]:
        guesses = {i: draft[len(got[i]) :] for i in todo}
        known = [(i, (*got[i], *guess[:n])) for i, guess in guesses.items() for n in range(len(guess) + 1)]
        rows = [row(tokens, (0,), seed=seeds[i], **params) for i, tokens in known]
        sampled, _ = sample(chain[[(0, *tokens)[-1] for _, tokens in known]], rows)
        for i, guess in guesses.items():
            got[i] += verify(sampled[: len(guess) + 1], guess)
            del sampled[: len(guess) + 1]
    return [tuple(tokens[:2]) for tokens in got]


CUT = {"temperature": 0.7, "top_p": 0.9, "presence_penalty": 1.5}


@pytest.mark.parametrize("params", [{}, pytest.param(CUT, marks=pytest.mark.slow)], ids=str)
def test_drafts_change_neither_the_tokens_of_a_seed_nor_the_distribution(params: dict[str, float]):
    """Pairs of tokens. The same seeds: the same pairs. 20,000 against 20,000 of other seeds: chi-square."""
    chain, n = torch.randn(6, 6, generator=torch.Generator().manual_seed(0)) * 1.5, 20_000
    plain = answers(chain, [], range(n, 2 * n), **params)
    likely = max(set(plain), key=plain.count)
    for draft in ([1, 2], [4], [*likely, 3]):
        assert answers(chain, draft, range(n, n + 300), **params) == plain[:300]
    counts = np.zeros((2, 36))
    for i, pairs in enumerate((answers(chain, list(likely), range(n), **params), plain)):
        np.add.at(counts[i], [6 * first + second for first, second in pairs], 1)
    seen = counts.sum(0) > 10
    chi_square = ((counts[0] - counts[1]) ** 2 / counts.sum(0).clip(1))[seen].sum()
    assert chi_square < seen.sum() + 5 * np.sqrt(2 * seen.sum()), chi_square
