"""One scheduler that decodes on demand: `scheduler.py` starts it in the environment of nanopd, and in that of vLLM.

    python peer_scheduler.py nanopd|vllm '{"running": 256, "blocks": 20000, "model": DIR}'

For each line {"steps": n} it answers {"seconds": [n numbers]}: `schedule` and `update_from_output` of a step in which all
requests decode one token. No model runs, every sampled token is 7; making that answer is not timed. Both schedulers have
blocks of 16 tokens, prefix caching, prompts of 128 random tokens and nobody waiting. Only `_nanopd` imports anything of
ours.
"""

import itertools
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

BLOCK_SIZE, PROMPT_LEN, MAX_MODEL_LEN = 16, 128, 4096


def _nanopd(running: int, blocks: int, model: str) -> tuple[str, Iterator[float]]:
    from tests.bench.scheduler import decode_steps

    return "nanopd", decode_steps(running, 0, blocks)


def _vllm(running: int, blocks: int, model: str) -> tuple[str, Iterator[float]]:
    import torch
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    config = EngineArgs(
        model=model,
        dtype="float32",
        block_size=BLOCK_SIZE,
        enable_prefix_caching=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=running,
        max_num_batched_tokens=max(2048, 2 * running),
        enforce_eager=True,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=3, head_size=64, dtype=torch.float32)
    kv_cache_config = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    core = Scheduler(config, kv_cache_config, StructuredOutputManager(config), BLOCK_SIZE)
    hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    hasher = get_request_block_hasher(BLOCK_SIZE, hash_function)
    rng = random.Random(0)
    for i in range(running):
        prompt = [rng.randrange(49_000) for _ in range(PROMPT_LEN)]
        params = vllm.SamplingParams(temperature=0, max_tokens=MAX_MODEL_LEN - PROMPT_LEN, ignore_eos=True)
        core.add_request(Request(str(i), prompt, params, None, block_hasher=hasher))
    return f"vllm {vllm.__version__}", _vllm_steps(core, running)


def _vllm_steps(core: Any, running: int) -> Iterator[float]:
    from vllm.v1.outputs import ModelRunnerOutput

    while True:
        start = time.perf_counter()
        plan = core.schedule()
        planned = time.perf_counter()
        ids = list(plan.num_scheduled_tokens)
        tokens = [[7] if core.requests[i].num_computed_tokens >= PROMPT_LEN else [] for i in ids]
        answer = ModelRunnerOutput(ids, {name: i for i, name in enumerate(ids)}, tokens)
        answered = time.perf_counter()
        core.update_from_output(plan, answer)
        if plan.total_num_scheduled_tokens == running and not plan.scheduled_new_reqs:
            yield time.perf_counter() - answered + planned - start


def main(name: str, options: dict[str, Any]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to standard output; only answers may stand there
    what, steps = {"nanopd": _nanopd, "vllm": _vllm}[name](**options)
    print(json.dumps({"engine": what}), file=answers, flush=True)
    for line in sys.stdin:
        seconds = list(itertools.islice(steps, json.loads(line)["steps"]))
        print(json.dumps({"seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
