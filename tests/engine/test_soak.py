"""Many requests through one engine: nothing grows, nothing is left."""

import random
from pathlib import Path

import psutil
import pytest

from nanopd import LLM, SamplingParams


def soak(model: Path, num_requests: int) -> list[float]:
    """Resident MiB after each tenth of the requests; a quarter of them is aborted on the way."""
    llm = LLM(str(model), num_blocks=300, block_size=8, max_num_seqs=32)
    rng, process = random.Random(0), psutil.Process()
    prefixes = [[rng.randrange(256) for _ in range(20)] for _ in range(10)]
    sent, resident = 0, []
    while sent < num_requests or llm.has_unfinished_requests():
        while sent < num_requests and llm.stats().num_waiting < 8:
            prompt = rng.choice(prefixes) + [rng.randrange(256) for _ in range(rng.randrange(1, 20))]
            stop = ("a", "bc") if sent % 5 == 0 else ()
            params = SamplingParams(
                temperature=sent % 2, max_tokens=rng.randrange(1, 12), stop=stop, logprobs=sent % 3 or None
            )
            llm.add_request(prompt, params, str(sent))
            sent += 1
            if sent % (num_requests // 10) == 0:
                resident.append(process.memory_info().rss / 2**20)
        llm.step()
        if rng.random() < 0.25:
            llm.abort_requests([str(rng.randrange(max(0, sent - 32), sent))])
    llm.step()
    llm.core.scheduler.check_invariants()
    assert llm.core.scheduler.kv.pool.num_free_blocks == 300
    assert not llm.core.runner.rows, "the runner forgot everybody too"
    assert not llm._running
    return resident


def test_a_few_hundred_requests(tiny_model: Path):
    soak(tiny_model, 300)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_5000_requests_in_flat_memory(tiny_model: Path):
    resident = soak(tiny_model, 5000)
    print("resident MiB after each tenth:", [round(r) for r in resident])
    assert max(resident[5:]) < 1.02 * resident[2], resident
