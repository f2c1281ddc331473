"""The whole engine on the Triton kernels, interpreted on the CPU: the same tokens (T3, T4); and the padding of graphs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanopd import LLM, SamplingParams
from nanopd.worker.model_runner import BatchExecution, StepInputs
from tests.engine.test_parity import make_prompts

pytest.importorskip("triton")
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = make_prompts(6, longest=30)


def run(model: Path, backend: str, **options: Any) -> tuple[list[list[int]], LLM]:
    llm = LLM(str(model), dtype="float32", attention_backend=backend, check_invariants=True, **options)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)], llm


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 90, "block_size": 4},
        {"num_blocks": 12, "block_size": 4},  # preemptions
        {"num_blocks": 90, "block_size": 4, "long_prefill_token_threshold": 7, "kv_layout": "cross_layer"},
    ],
    ids=["plain", "preemptions", "chunks"],
)
def test_the_same_tokens_as_on_the_cpu_backend(tiny_model: Path, options: dict[str, Any]):
    expected, cpu = run(tiny_model, "cpu", **options)
    tokens, llm = run(tiny_model, "triton", **options)
    assert tokens == expected
    assert llm.stats() == cpu.stats()
    assert (llm.stats().num_preemptions > 0) == (options["num_blocks"] == 12)
    assert llm.stats().prefix_cache_hits > 0


def test_a_sliding_window(tiny_mistral: Path):
    assert run(tiny_mistral, "triton", num_blocks=60)[0] == run(tiny_mistral, "cpu", num_blocks=60)[0]


def test_no_graph_is_larger_than_the_buffers(tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    runner = LLM(str(tiny_model), num_blocks=10, max_num_batched_tokens=17).core.runner
    captured: list[int] = []

    class Graph:
        def __init__(self, *_: object, **__: object) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    for name in ("graph_pool_handle", "synchronize"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda: None)
    for name in ("CUDAGraph", "graph"):
        monkeypatch.setattr(f"torch.cuda.{name}", Graph)
    monkeypatch.setattr(runner, "_model_forward", lambda input_ids, *_: captured.append(len(input_ids)))
    runner.capture_graphs()
    assert sorted(runner.graphs) == [1, 2, 4, 8, 16]
    assert set(captured) == set(runner.graphs), "each forward got a batch of its size"


def batch(query_lens: list[int]) -> StepInputs:
    lens = np.array(query_lens)
    return StepInputs([], np.arange(len(lens)), lens, lens + 3, np.arange(len(lens)), lens * 0)


def test_a_graph_is_chosen_for_decodes_alone_and_padded_to_the_next_size(tiny_model: Path):
    runner = LLM(str(tiny_model), num_blocks=10).core.runner
    choose = runner._determine_batch_execution_and_padding
    assert choose(batch([1, 1, 1])) == BatchExecution(False, 3), "nothing was captured"
    runner.graphs = dict.fromkeys((1, 2, 4, 8))  # type: ignore[assignment]
    assert choose(batch([1])) == BatchExecution(True, 1)
    assert choose(batch([1] * 3)) == BatchExecution(True, 4)
    assert choose(batch([1] * 8)) == BatchExecution(True, 8)
    assert choose(batch([1] * 9)) == BatchExecution(False, 9), "larger than the largest"
    assert choose(batch([1, 2])) == BatchExecution(False, 3), "a chunk of prefill"


def test_padding_changes_no_token_and_writes_nothing(tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    """What a captured graph would compute, run eagerly: decodes padded to 8 rows."""
    expected, _ = run(tiny_model, "cpu", num_blocks=60)
    llm = LLM(str(tiny_model), dtype="float32", attention_backend="triton", num_blocks=60)
    runner, padded = llm.core.runner, []

    def pad(inputs: StepInputs) -> BatchExecution:
        num_tokens = int(inputs.query_lens.sum())
        if num_tokens > len(inputs.rows):
            return BatchExecution(False, num_tokens)
        padded.append(num_tokens)
        return BatchExecution(False, 8)

    monkeypatch.setattr(runner, "_determine_batch_execution_and_padding", pad)
    assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)] == expected
    assert padded
    assert max(padded) < 8
    used = {block for row in runner.block_table for block in row}
    memory = runner.kv_cache.memory  # kv_first: (layer, 2, block, slot, head, dim)
    assert not memory[:, :, [b for b in range(60) if b not in used]].any(), "only blocks of requests were written"
