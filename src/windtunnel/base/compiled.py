"""Functions that Numba compiles, without a loss of their types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., Any])


def jit(function: F) -> F:
    """Compile ``function`` at its first call; the result is kept on disk, and the GIL is let go of in it."""
    return cast(F, njit(cache=True, nogil=True)(function))


def jit_inline(function: F) -> F:
    """As `jit`, but part of its callers: a call would copy the header of every array that it is given."""
    return cast(F, njit(nogil=True, forceinline=True)(function))
