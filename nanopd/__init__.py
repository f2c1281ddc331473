"""nanopd: a small LLM inference engine to read, run and take apart.

    from nanopd import LLM, SamplingParams

Nothing heavy is imported until `LLM` is asked for, so that the command line starts fast.
"""

import os
from typing import TYPE_CHECKING, Any

from nanopd.config import EngineConfig, SamplingParams, UserError

if TYPE_CHECKING:
    from nanopd.engine.llm import LLM

# OpenMP's threads would spin between two operations; beside any other busy process that makes a step many times slower.
# It has to be said before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "SamplingParams", "UserError", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from nanopd.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'nanopd' has no attribute {name!r}")
