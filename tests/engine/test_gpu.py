"""The whole engine on a GPU: captured graphs and eager steps give the tokens that the CPU gives (`make test-gpu`)."""

from pathlib import Path
from typing import Any

import pytest
import torch

from nanopd import LLM, SamplingParams
from tests.engine.test_parity import make_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_blocks": 36, "block_size": 16, "max_num_seqs": 8},  # preemptions
        {"max_num_batched_tokens": 17},  # fewer tokens than sequences: no graph may be larger
        {"long_prefill_token_threshold": 7, "kv_layout": "cross_layer"},
    ],
    ids=str,
)
def test_the_same_tokens_as_on_the_cpu(tiny_model: Path, options: dict[str, Any]):
    def run(backend: str) -> tuple[list[list[int]], LLM]:
        llm = LLM(str(tiny_model), dtype="float32", attention_backend=backend, check_invariants=True, **options)
        return [o.outputs[0].token_ids for o in llm.generate(make_prompts(), PARAMS)], llm

    expected, _ = run("cpu")
    tokens, llm = run("triton")
    assert llm.core.device == "cuda"
    assert llm.core.runner.graphs
    assert tokens == expected
