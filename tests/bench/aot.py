"""Compile every kernel for GPUs that are not here, and read back what the compilers made of it (T3).

The launches are not described a second time: the host wrappers run on meta tensors (shapes, no data), and where they would
launch a kernel, it is compiled, specialised by Triton itself for these arguments (an int of 1 becomes a constant; that a
pointer or a stride is divisible by 16 is made known). It takes no GPU, no driver and no CUDA toolkit: ptxas, cuobjdump and
LLVM come inside Triton. Needs a process without TRITON_INTERPRET.

    python -m tests.bench.aot [TARGET…]      one JSON object a line
"""

import functools
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from nanopd.kernels import kv_store, paged_attention, slot_mapping

TARGETS = {  # what the compiler calls a chip; its processors, and the bytes of shared memory one program may have
    "sm_80": (GPUTarget("cuda", 80, 32), (108, 163 * 1024)),  # A100
    "sm_90": (GPUTarget("cuda", 90, 32), (132, 227 * 1024)),  # H100, H200
    "sm_100": (GPUTarget("cuda", 100, 32), (148, 227 * 1024)),  # B200
    "gfx942": (GPUTarget("hip", "gfx942", 64), (304, 64 * 1024)),  # MI300X
}
SHAPES = {"llama-3-8b": (32, 8, 128), "qwen3-0.6b": (16, 8, 128), "smollm2-135m": (9, 3, 64)}  # Hq, Hkv, D
KERNELS = {
    "slot_mapping": slot_mapping._slot_mapping_kernel, "store_kv": kv_store._store_kv_kernel,
    "attention_{}": paged_attention._attention_kernel, "merge": paged_attention._merge_kernel,
}  # fmt: skip
# A line of SASS, or of AMD's assembly, and the kinds of instructions as the two spell them:
#     /*0a50*/ @!P0 LDG.E R2, desc[UR4][R2.64] ;               global_load_dwordx2 v[2:3], v0, s[2:3]
INSTRUCTION = re.compile(r"^\s+(?:/\*[0-9a-f]{4,}\*/\s+(?:@\S+ )?([A-Z]\S*)|((?:s|v|global|buffer|ds)_\S+))", re.M)
MIX = {
    "matrix": r"[HQ]MMA|\w*GMMA|UTC\w*MMA|v_mfma", "load": r"LDG\b|global_load|buffer_load|s_load",
    "load_to_shared": r"LDGSTS", "store": r"STG|global_store|buffer_store", "shared": r"LDS|STS|ds_",
    "exp": r"MUFU\.EX2|v_exp_f32", "all": r"",
}  # fmt: skip


def compile_model(heads: int, kv_heads: int, dim: int, target: str) -> dict[str, dict[str, Any]]:
    """What the engine launches for a model, in bfloat16: a prefill of 8,192 tokens, a decode of 64 x 4,096. By kernel.

    The decode is cut in splits even where the chip is full without, so that the merge and its input are seen too.
    """
    found, (gpu, chip) = dict[str, dict[str, Any]](), TARGETS[target]
    empty, block_size = functools.partial(torch.empty, device="meta"), 16
    try:
        for phase, reqs, query_len, seq_len, splits in (("prefill", 1, 8192, 8192, 1), ("decode", 64, 1, 4096, 4)):
            for name, kernel in KERNELS.items():
                # In the instance: hides its class's method.
                kernel.run = functools.partial(build, found, name.format(phase), kernel, gpu)
            q, k, v = (empty(reqs * query_len, n, dim, dtype=torch.bfloat16) for n in (heads, kv_heads, kv_heads))
            k_cache, v_cache = empty(2, 4096, block_size, kv_heads, dim, dtype=torch.bfloat16)
            table, starts, lens = (empty(n, dtype=torch.int32) for n in ((reqs, seq_len // block_size), reqs + 1, reqs))
            slots, group = empty(len(q), dtype=torch.int64), heads // kv_heads
            tiles = paged_attention.choose_tiles(len(q), reqs, kv_heads, group, 2, query_len, seq_len, *chip)
            slot_mapping.slot_mapping(slots, starts, table, block_size, slots)
            kv_store.store_kv(k, v, k_cache, v_cache, slots)
            paged_attention.paged_attention(
                q, k_cache, v_cache, table, starts, lens, dim**-0.5, max_query_len=query_len,
                tiles=replace(tiles, num_splits=splits),
            )  # fmt: skip
    finally:
        for kernel in KERNELS.values():
            del kernel.run
    return found


def build(found: Any, name: str, kernel: Any, gpu: Any, *args: Any, grid: Any, warmup: Any, **kwargs: Any) -> None:
    """Compile instead of launching. Note registers and spilled bytes a thread, shared bytes a program, instructions."""
    backend = make_backend(gpu)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    options, signature, constants, attributes = kernel._pack_args(backend, kwargs, *bind(*args, **kwargs))
    compiled = triton.compile(ASTSource(kernel, signature, constants, attributes), target=gpu, options=options.__dict__)
    listing, fields = compiled.asm.get("amdgcn"), (r"\.vgpr_count:\s+(\d+)", r"\.private_segment_fixed_size:\s+(\d+)")
    if gpu.backend == "cuda":  # registers that do not fit go to the stack; these kernels put nothing else there
        fields = r"REG:(\d+)", r"(?:STACK|LOCAL):(\d+)"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.kernel)
            file.flush()
            command = [triton.knobs.nvidia.cuobjdump.path, "-sass", "-res-usage", file.name]
            listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, spills = (sum(map(int, re.findall(field, listing))) for field in fields)
    words = [sass or amd for sass, amd in INSTRUCTION.findall(listing)]
    mix = {kind: sum(bool(re.match(pattern, word)) for word in words) for kind, pattern in MIX.items()}
    found[name] = {"registers": registers, "spills": spills, "shared": compiled.metadata.shared, "instructions": mix}


def report(*targets: str) -> list[dict[str, Any]]:
    """A row for every kernel, shape and target (default: all). 40 s a target on one core, then Triton's cache has it."""
    return [
        {"kernel": name, "target": target, "shape": shape, "shared_limit": TARGETS[target][1][1]} | figures
        for target in targets or TARGETS
        for shape, sizes in SHAPES.items()
        for name, figures in compile_model(*sizes, target).items()
    ]


if __name__ == "__main__":
    for row in report(*sys.argv[1:]):
        print(json.dumps(row))
