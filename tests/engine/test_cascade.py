"""Cascade attention changes no token: however the work is cut up, on both backends, and only where it pays."""

import random
from pathlib import Path
from typing import Any

import pytest

from nanopd import LLM, SamplingParams
from nanopd.serve.metrics import Metrics
from nanopd.trace.events import Planned, Sampled
from nanopd.trace.file import read
from nanopd.worker import attention, model_runner
from nanopd.worker.model_runner import ModelRunner

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def prompts(shared: int, n: int = 5) -> list[list[int]]:
    rng = random.Random(5)
    prefix = [rng.randrange(200) for _ in range(shared)]
    return [prefix + [rng.randrange(200) for _ in range(rng.randint(1, 14))] for _ in range(n)]


@pytest.fixture
def depths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks each step computed once for all, on a scale where little is enough to pay."""
    monkeypatch.setattr(model_runner, "CASCADE_TOKENS", 16)
    seen: list[int] = []
    real = ModelRunner._compute_cascade

    def compute(self: ModelRunner, *args: Any) -> int:
        seen.append(real(self, *args))
        return seen[-1]

    monkeypatch.setattr(ModelRunner, "_compute_cascade", compute)
    return seen


def run(model: Path, work: list[list[int]], **options: Any) -> list[list[int]]:
    defaults: dict[str, Any] = {"num_blocks": 120, "block_size": 4, "max_model_len": 120}
    llm = LLM(str(model), dtype="float32", check_invariants=True, **defaults | options)
    llm.generate(work[:1], PARAMS)  # so that the others find the prefix
    return [output.outputs[0].token_ids for output in llm.generate(work, PARAMS)]


@pytest.mark.parametrize("backend", ["cpu", "compiled", "triton"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"long_prefill_token_threshold": 3},
        {"num_blocks": 30},  # preemptions
        {"max_num_batched_tokens": 7, "kv_layout": "cross_layer"},
        {"speculative_ngram": 3},
    ],
    ids=["plain", "chunks", "preemptions", "small budget", "drafts"],
)
def test_the_same_tokens(
    tiny_model: Path, depths: list[int], backend: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    if backend == "triton":
        pytest.importorskip("triton")
    if backend == "compiled":
        monkeypatch.setattr(attention, "LONG_CONTEXT", 1)
        backend = "cpu"
    work = prompts(shared=24)
    expected = run(tiny_model, work, attention_backend=backend, **options)
    assert not any(depths), "nobody asked for it"
    depths.clear()
    assert run(tiny_model, work, attention_backend=backend, cascade_attention=True, **options) == expected
    assert max(depths) >= 5


def test_trace_and_metric_tell_what_was_saved(tiny_model: Path, tmp_path: Path, depths: list[int]):
    """What was read once for all, not what the plan had offered; nothing of it without the option."""
    for cascade in (True, False):
        depths.clear()
        options: dict[str, Any] = {"num_blocks": 120, "block_size": 4, "speculative_ngram": 3}
        trace = tmp_path / f"{cascade}.jsonl"
        llm = LLM(str(tiny_model), dtype="float32", trace=str(trace), cascade_attention=cascade, **options)
        llm.generate(prompts(shared=24), PARAMS)
        events = [line.event for line in read(trace)[1]]
        told = [event.num_common_prefix_blocks for event in events if isinstance(event, Sampled)]
        readers = [len(event.scheduled) for event in events if isinstance(event, Planned)]
        assert told == depths
        assert llm.stats().cascade_saved_tokens == sum(
            4 * blocks * (n - 1) for blocks, n in zip(told, readers, strict=True)
        )
        assert (llm.stats().cascade_saved_tokens > 0) == cascade
        metrics = Metrics()
        metrics.scheduler = llm.stats()
        assert f"cascade_saved_tokens_total {float(metrics.scheduler.cascade_saved_tokens)}" in metrics.text().decode()
        assert ("num_common_prefix_blocks" in trace.read_text()) == cascade, "a trace is as it was without"


def test_not_where_it_does_not_pay(tiny_model: Path, depths: list[int]):
    run(tiny_model, prompts(shared=0), cascade_attention=True)
    run(tiny_model, prompts(shared=24, n=1), cascade_attention=True)
    assert not any(depths)


def test_no_token_of_the_prefix_itself_is_in_the_batch(tiny_model: Path, depths: list[int]):
    """While one request computes the prefix and the others share its blocks already, its tokens must not see them all."""
    llm = LLM(str(tiny_model), dtype="float32", num_blocks=120, block_size=4, cascade_attention=True)
    plain = LLM(str(tiny_model), dtype="float32", num_blocks=120, block_size=4)
    work = prompts(shared=40)
    tokens = [[output.outputs[0].token_ids for output in engine.generate(work, PARAMS)] for engine in (llm, plain)]
    assert tokens[0] == tokens[1]
    assert depths[0] == 0
    assert max(depths) == 10


def test_a_sliding_window_has_no_cascade(tiny_mistral: Path, depths: list[int]):
    assert run(tiny_mistral, prompts(shared=24), cascade_attention=True) == run(tiny_mistral, prompts(shared=24))
    assert not any(depths)
