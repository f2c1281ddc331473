"""The three Triton kernels of the engine (rules T1-T4), and the loops for CPUs. What each computes stands in plain PyTorch
in tests/kernels/reference.py; `nanopd bench kernels` times them, or shows what the compilers make of them.

    slot_mapping.py      position of a token            -> its slot in the KV cache
    kv_store.py          new keys and values            -> their slots
    paged_attention.py   queries, the cache, its tables -> attention output (and the merge of partial outputs)
    cpu_paged_attention.py   the same for decodes, by Numba, where there is no GPU
    cpu_elementwise.py   norms, RoPE, SwiGLU            by Numba, in one pass each

With TRITON_INTERPRET=1 in the environment the kernels run in Python, on CPU tensors; without it they compile. Triton reads
the variable while it is imported, for its own library too: set it before anything imports triton (best: before the process
starts). One process is one or the other. Nothing in this package knows about requests, layers or models.
"""

import os

# A multiply and an add may become one instruction (softmax: x * scale - max). Triton 3.9 warns unless that is said.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
