"""What the loops for CPUs have in common: how Numba compiles them, keeps them, and runs them on all threads.

A loop is a plain Python function over NumPy arrays. Numba compiles it when it is first called, for the processor at hand and
the types it is called with, and keeps the result on disk: beside the file, or in the user's cache. NumPy does not know
bfloat16, so such arrays come as uint16: `widen` makes float32 of a number of them, `narrow` the reverse.
"""

# mypy: disable-error-code="no-untyped-call"

import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import config, njit, prange, set_num_threads, types
from numba.core.caching import FunctionCache
from numba.extending import overload
from torch import Tensor

TAYLOR = np.array([math.log(2) ** k / math.factorial(k) for k in range(8)], dtype=np.float32)


class Cache(FunctionCache):
    """What Numba has compiled, on disk. It only saves time: damaged files are compiled anew, and a full disk keeps none."""

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        """Which one of a function's files. Numba adds what the function has from around it, and that looks new each time;
        what it has from here is as old as this file."""
        return sig, codegen.magic_tuple(), Path(__file__).stat().st_mtime_ns

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # whatever reading a pickle cut short may raise
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(OSError):
            super().save_overload(sig, data)


def compiled(function: Callable[..., Any], *constants: int, parallel: bool = False) -> Callable[..., Any]:
    """Numba's form of it. Sums may be taken in any order, else no loop over them could use vector instructions; other
    threads may run meanwhile. Kept on disk, if there is a folder that can be written.

    The constants that it has from around it become part of its name, by which Numba finds its file. Without, two processes
    that compile it with others give both the same name, and a third one runs either.
    """
    function.__qualname__ = "_".join(map(str, [function.__qualname__, *constants]))
    dispatcher: Any = njit(fastmath=True, error_model="numpy", nogil=True, parallel=parallel)(function)
    with suppress(RuntimeError):
        dispatcher._cache = Cache(function)
    return dispatcher  # type: ignore[no-any-return]


def as_array(x: Tensor) -> np.ndarray:
    """The same memory; bfloat16, which NumPy does not know, as uint16."""
    return x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()


def over(function: Callable[..., None], parallel_from: int) -> Callable[..., None]:
    """`function(first, last, *arguments)`, compiled, as a function of (n, *arguments): it does 0 to n, from n =
    `parallel_from` on in parts, on torch.get_num_threads() threads. Tensors come to it as arrays."""
    alone = compiled(function)

    def parts(num_parts, n, *arguments):  # type: ignore[no-untyped-def]
        for part in prange(num_parts):
            alone(n * part // num_parts, n * (part + 1) // num_parts, *arguments)

    parts.__qualname__ = f"{function.__qualname__}_in_parts"
    together = compiled(parts, parallel=True)

    def run(n: int, *arguments: Any) -> None:
        arrays = [as_array(x) if isinstance(x, Tensor) else x for x in arguments]
        if n < parallel_from:
            alone(0, n, *arrays)
        else:
            threads = min(torch.get_num_threads(), config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
            set_num_threads(threads)
            together(threads, n, *arrays)

    return run


@compiled
def exp2(x):  # type: ignore[no-untyped-def]
    """2^x for float32 x <= 0, to 1e-7: 2^f by Taylor's series for f within 1/2 of 0, and 2^n by its bits: n + 127 is the
    exponent of a float32. The library's function is a call for each number, this a few instructions for eight of them."""
    x = max(x, np.float32(-126))
    n = np.rint(x)
    f = x - n
    y = TAYLOR[7]
    for k in range(6, -1, -1):
        y = y * f + TAYLOR[k]
    return y * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


def widen(x: Any) -> Any:
    """A number of the cache as float32: it is one, or a bfloat16 seen as uint16, which is the upper half of one."""
    raise NotImplementedError  # below are its two forms


@overload(widen)
def _widen(x):  # type: ignore[no-untyped-def]
    if isinstance(x, types.Integer):
        return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    return lambda x: x


def narrow(x: Any, like: Any) -> Any:
    """A float32 as a number of the cache, of the type of `like`: the nearest, and of two the even one."""
    raise NotImplementedError


@overload(narrow)
def _narrow(x, like):  # type: ignore[no-untyped-def]
    def to_bfloat16(x, like):  # type: ignore[no-untyped-def]
        bits = np.float32(x).view(np.uint32)
        return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))

    return to_bfloat16 if isinstance(like, types.Integer) else lambda x, like: x
