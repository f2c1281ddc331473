"""nanopd: a small LLM inference engine to read, run and take apart.

    from nanopd import LLM, SamplingParams

Nothing heavy is imported until `LLM` is asked for, so that the command line starts fast.
"""

import os
from typing import TYPE_CHECKING, Any

from nanopd.config import EngineConfig, SamplingParams, UserError

if TYPE_CHECKING:
    from nanopd.engine.llm import LLM

# How OpenMP's threads wait between two operations; it has to be said before torch is imported. By default they spin for
# milliseconds: beside another busy process that makes a step many times slower. "passive" sleeps at once, and waking up
# takes tens of microseconds, as long as an operation of a decode. So they spin for a fifth of a millisecond, and then sleep.
OPENMP = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"}
if OPENMP.keys().isdisjoint(os.environ):  # else the user has said it
    os.environ.update(OPENMP)

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "SamplingParams", "UserError", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from nanopd.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'nanopd' has no attribute {name!r}")
