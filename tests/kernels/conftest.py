"""Without a GPU the kernels run in Triton's interpreter, which has to be chosen before anything imports triton."""

import os
import sys

import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    if "triton" in sys.modules:
        raise RuntimeError(
            "triton was imported before tests/kernels could ask for its interpreter: run with TRITON_INTERPRET=1 in the "
            "environment, or set it in tests/conftest.py"
        )
    os.environ["TRITON_INTERPRET"] = "1"
