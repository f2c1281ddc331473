"""Greedy float32 tokens are transformers' tokens, however the work is cut up (DESIGN section 6)."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from nanopd import LLM, SamplingParams
from nanopd.kernels import cpu_paged_attention
from nanopd.worker import attention
from tests.engine.conftest import VOCAB_SIZE, check_greedy, reference

NUM_TOKENS = 20
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def make_prompts(n: int = 20, longest: int = 120, vocab_size: int = VOCAB_SIZE) -> list[list[int]]:
    """Mixed lengths from 1 on; every third begins like the one before it."""
    rng = random.Random(1)
    prompts: list[list[int]] = []
    for i in range(n):
        length = 1 + (longest - 1) * i // max(1, n - 1)
        prompt = [rng.randrange(vocab_size) for _ in range(length)]
        if i % 3 == 2:
            shared = min(len(prompts[-1]), length - 1)
            prompt[:shared] = prompts[-1][:shared]
        prompts.append(prompt)
    return prompts


def generate(model: Path, prompts: list[list[int]], **options: Any) -> tuple[list[list[int]], LLM]:
    llm = LLM(str(model), dtype="float32", check_invariants=True, **({"num_blocks": 600} | options))
    outputs = llm.generate(prompts, GREEDY)
    assert llm.core.scheduler.kv.pool.num_free_blocks == len(llm.core.scheduler.kv.pool.blocks)
    return [output.outputs[0].token_ids for output in outputs], llm


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[int]]:
    """The tokens of one plain run, held against transformers."""
    prompts = make_prompts()
    tokens, _ = generate(tiny_model, prompts)
    for prompt, answer in zip(prompts, tokens):
        check_greedy(tiny_model, prompt, answer)
    return tokens


def test_the_same_as_transformers_generate(tiny_model: Path, expected: list[list[int]]):
    """`check_greedy` argues by induction; here is `generate` itself."""
    prompt = make_prompts()[7]
    ids = reference(tiny_model).generate(
        torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0
    )
    assert ids[0, len(prompt) :].tolist() == expected[7]


@pytest.mark.parametrize("fixture", ["tiny_mistral", "tiny_qwen2", "tiny_qwen3"])
def test_other_architectures(fixture: str, request: pytest.FixtureRequest):
    model, prompts = request.getfixturevalue(fixture), make_prompts(8)
    for options in ({}, {"long_prefill_token_threshold": 7, "kv_layout": "cross_layer"}):
        tokens, _ = generate(model, prompts, **options)
        for prompt, answer in zip(prompts, tokens):
            check_greedy(model, prompt, answer)


@pytest.mark.parametrize(
    "options",
    [
        *({"long_prefill_token_threshold": n} for n in (1, 7, 16, 64)),
        *({"max_num_batched_tokens": n} for n in (17, 18, 33, 100)),
        {"max_num_batched_tokens": 17, "max_num_seqs": 3},
        {"enable_prefix_caching": False},
        {"kv_layout": "blocks_first"},
        {"kv_layout": "cross_layer"},
        {"block_size": 1, "num_blocks": 3000},
        {"block_size": 32},
        {"block_size": 5},
        {"max_num_seqs": 1},
    ],
    ids=str,
)
def test_however_the_work_is_cut_up(tiny_model: Path, expected: list[list[int]], options: dict[str, Any]):
    assert generate(tiny_model, make_prompts(), **options)[0] == expected


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"long_prefill_token_threshold": 7, "kv_layout": "blocks_first"},
        {"speculative_ngram": 3, "kv_layout": "cross_layer"},
        {"num_blocks": 36, "block_size": 4},  # preemptions
    ],
    ids=str,
)
def test_with_the_compiled_loop_over_blocks(
    tiny_model: Path, expected: list[list[int]], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(attention, "LONG_CONTEXT", 1)
    rows: list[int] = []
    real = cpu_paged_attention.paged_decode

    def paged_decode(query: torch.Tensor, *args: Any) -> Any:
        rows.append(len(query))
        return real(query, *args)

    monkeypatch.setattr(cpu_paged_attention, "paged_decode", paged_decode)
    assert generate(tiny_model, make_prompts(), **options)[0] == expected
    assert max(rows) > 10, "the loop was not used"


@pytest.mark.parametrize("options", [{}, {"speculative_ngram": 3}, {"cascade_attention": True}], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrower_types(tiny_model: Path, dtype: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    """Which dtype a machine takes by itself depends on its processor, so each must work on all.

    The first token is the best in float32, too, wherever that is clear; between two close ones rounding decides.
    """
    monkeypatch.setattr(attention, "LONG_CONTEXT", 1)
    llm = LLM(str(tiny_model), dtype=dtype, check_invariants=True, num_blocks=600, **options)
    llm.core.warm_up()
    prompts = [[*range(3, 40), *prompt] for prompt in make_prompts()]
    firsts = [output.outputs[0].token_ids[0] for output in llm.generate(prompts, GREEDY)]
    for prompt, first in zip(prompts, firsts):
        check_greedy(tiny_model, prompt, [first], min_margin=0.05)


@pytest.mark.parametrize("layout", ["kv_first", "blocks_first", "cross_layer"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_with_many_preemptions(tiny_model: Path, expected: list[list[int]], layout: str, prefix_caching: bool):
    options = {"num_blocks": 36, "block_size": 4, "kv_layout": layout, "enable_prefix_caching": prefix_caching}
    tokens, llm = generate(tiny_model, make_prompts() * 4, **options)
    assert llm.stats().num_preemptions >= 20
    assert tokens == expected * 4


def test_shared_prefixes_are_computed_once(tiny_model: Path):
    prefix = make_prompts(1, longest=1)[0] * 128
    prompts = [[*prefix, i] for i in range(16)]
    cached, llm = generate(tiny_model, prompts)
    assert llm.stats().prefix_cache_hits == 15 * 128
    plain, _ = generate(tiny_model, prompts, enable_prefix_caching=False)
    assert cached == plain
    again = llm.generate(prompts, GREEDY)
    assert [output.outputs[0].token_ids for output in again] == plain
    assert all(output.metrics.num_cached_tokens == 128 for output in again)


def test_in_random_order_and_with_others_aborted_half_way(tiny_model: Path, expected: list[list[int]]):
    prompts = make_prompts()
    llm = LLM(str(tiny_model), dtype="float32", num_blocks=40, block_size=8, check_invariants=True)
    rng = random.Random(3)
    order = [(i, keep) for i in range(len(prompts)) for keep in (True, False)]
    rng.shuffle(order)
    outputs = {}
    for i, keep in order:
        outputs[i, keep] = llm.add_request(prompts[i], GREEDY, f"{i}-{keep}")
        for _ in range(rng.randrange(3)):
            llm.step()
        victim = rng.randrange(len(prompts))
        if (victim, False) in outputs:
            llm.abort_requests([f"{victim}-False"])
    while llm.has_unfinished_requests():
        llm.step()
        llm.abort_requests([f"{rng.randrange(len(prompts))}-False"])
    assert [outputs[i, True].outputs[0].token_ids for i in range(len(prompts))] == expected
    assert any(output.outputs[0].finish_reason == "abort" for output in outputs.values())
    llm.step()
    llm.core.scheduler.check_invariants()
    assert llm.core.scheduler.kv.pool.num_free_blocks == 40


def default_model_parity(num_prompts: int, longest: int, num_tokens: int) -> None:
    llm = LLM(dtype="float32", num_blocks=2000)
    prompts = make_prompts(num_prompts, longest, vocab_size=49_000)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    for prompt, output in zip(prompts, llm.generate(prompts, params)):
        check_greedy(llm.core.model_path, prompt, output.outputs[0].token_ids)


def test_the_default_model():
    default_model_parity(num_prompts=4, longest=200, num_tokens=12)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_default_model_32_prompts_64_tokens():
    default_model_parity(num_prompts=32, longest=700, num_tokens=64)
