"""The one way in which this engine compiles a function: cached on disk, without the interpreter's lock.

No fast-math: sums and maxima are taken in the order written, so that results are equal bit for bit to a
plain interpreter's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., Any])


def jit(function: F) -> F:
    """Compile ``function`` with Numba at its first call."""
    return cast(F, njit(cache=True, nogil=True)(function))


def jit_inline(function: F) -> F:
    """As `jit`, but part of its callers: a call would copy the header of every array that it is given."""
    return cast(F, njit(nogil=True, forceinline=True)(function))
