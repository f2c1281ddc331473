"""Compiles the engine's attention kernel for a GPU that is not here, and prints what came of it as JSON (T3).

    python compiled.py TARGET SHAPE PHASE      for example: sm_90 llama-3-8b decode

Targets and shapes are those of tests/bench/aot.py, phases are prefill (8,192 tokens) and decode (64 requests with 4,096).
Needs a process without TRITON_INTERPRET: the interpreter and the compiler exclude each other.
"""

import functools
import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from nanopd.kernels import paged_attention
from tests.bench import aot

PHASES = {"prefill": (1, 8192, 8192), "decode": (64, 1, 4096)}  # requests, new tokens of each, tokens of each


def compile_attention(target: str, shape: str, phase: str) -> dict[str, Any]:
    """Runs the host function on tensors without data; where it would launch, the kernel is compiled."""
    heads, kv_heads, dim = aot.SHAPES[shape]
    gpu, chip = aot.TARGETS[target]
    reqs, query_len, seq_len = PHASES[phase]
    empty = functools.partial(torch.empty, device="meta")
    query = empty(reqs * query_len, heads, dim, dtype=torch.bfloat16)
    k_cache, v_cache = empty(2, 4096, 16, kv_heads, dim, dtype=torch.bfloat16)
    table, starts, lens = (empty(n, dtype=torch.int32) for n in ((reqs, seq_len // 16), reqs + 1, reqs))
    tiles = paged_attention.choose_tiles(len(query), reqs, kv_heads, heads // kv_heads, 2, query_len, seq_len, *chip)
    found: dict[str, dict[str, Any]] = {}
    texts: list[dict[str, str]] = []

    def compile_and_keep(*args: Any, **options: Any) -> Any:
        compiled = real_compile(*args, **options)
        texts.append(compiled.asm)
        return compiled

    kernel, real_compile = paged_attention._attention_kernel, aot.triton.compile
    build = functools.partial(aot.build, found, "attention", kernel, gpu)
    with patch.object(aot.triton, "compile", compile_and_keep), patch.object(kernel, "run", build):
        paged_attention.paged_attention(
            query, k_cache, v_cache, table, starts, lens, dim**-0.5, max_query_len=query_len, tiles=tiles
        )
    # PTX, and no AMD assembly: {} there
    interesting = ("ld.global", "cp.async.ca.", "cp.async.cg.", "mma.sync.", "wgmma.mma_async", "ex2.", "st.global")
    ptx = [line.strip() for line in texts[0].get("ptx", "").splitlines() if any(word in line for word in interesting)]
    return {"tiles": vars(tiles), "shared_limit": chip[1], "ptx": ptx} | found["attention"]


if __name__ == "__main__":
    if len(sys.argv) < 4 or len(sys.argv) % 3 != 1:
        sys.exit(__doc__)
    for i in range(1, len(sys.argv), 3):
        print(json.dumps(compile_attention(*sys.argv[i : i + 3])))
