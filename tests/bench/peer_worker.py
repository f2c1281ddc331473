"""One engine that stays loaded and takes workloads: `peers.py` starts it in the engine's own environment.

    python peer_worker.py nanopd|vllm|transformers '{"model": DIR, "dtype": "float32", …}'

It reads a line of JSON, {"prompts": [token ids, …], "max_tokens": [number, …]}, from standard input, generates greedily with
nothing that ends an answer early, and answers {"seconds": …, "token_ids": [[…], …]}; the first line it writes, when it is
loaded, says what it is. Prompts arrive together. Loading is never timed. Only `_nanopd` imports anything of ours.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Tokens = list[list[int]]
Engine = Callable[[Tokens, list[int]], Tokens]  # prompts, how many tokens for each -> tokens

# The same limits for all who have them.
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, KV_GIB = 64, 2048, 2


def _nanopd(options: dict[str, Any]) -> tuple[str, Engine]:
    import torch

    from nanopd import LLM, SamplingParams

    llm = LLM(
        options["model"],
        dtype=options["dtype"],
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_model_len=options["max_model_len"],
        kv_cache_memory=f"{KV_GIB}GiB",
    )
    llm.core.warm_up()
    llm.core.runner.kv_cache.memory.zero_()  # vLLM writes to all of its own, too: then no page is new when it is measured

    def generate(prompts: Tokens, lengths: list[int]) -> Tokens:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    return f"nanopd, torch {torch.__version__}", generate


def _vllm(options: dict[str, Any]) -> tuple[str, Engine]:
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{options['threads'] - 1}")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    import vllm

    llm = vllm.LLM(
        options["model"],
        dtype=options["dtype"],
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_model_len=options["max_model_len"],
        kv_cache_memory_bytes=KV_GIB * 2**30,
        enforce_eager=options["eager"],
    )

    def generate(prompts: Tokens, lengths: list[int]) -> Tokens:
        params = [vllm.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    how = "eager" if options["eager"] else "compiled"
    return f"vllm {vllm.__version__}, {how}", generate


def _transformers(options: dict[str, Any]) -> tuple[str, Engine]:
    """One padded batch, which is computed until the longest answer is finished; shorter ones are cut afterwards."""
    import torch
    import transformers

    dtype = getattr(torch, options["dtype"])
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(options["model"], dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def generate(prompts: Tokens, lengths: list[int]) -> Tokens:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=max(lengths))
        return [row[:n] for row, n in zip(out[:, longest:].tolist(), lengths)]

    return f"transformers {transformers.__version__}, torch {torch.__version__}", generate


def main(name: str, options: dict[str, Any]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print to standard output; only answers may stand there
    what, generate = {"nanopd": _nanopd, "vllm": _vllm, "transformers": _transformers}[name](options)
    print(json.dumps({"engine": what}), file=answers, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        start = time.perf_counter()
        token_ids = generate(work["prompts"], work["max_tokens"])
        print(json.dumps({"seconds": time.perf_counter() - start, "token_ids": token_ids}), file=answers, flush=True)


if __name__ == "__main__":  # vLLM starts processes of its own from this file
    main(sys.argv[1], json.loads(sys.argv[2]))
