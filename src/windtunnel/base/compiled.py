"""Functions that Numba compiles, without a loss of their types."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

from numba import cfunc, njit, types

F = TypeVar("F", bound=Callable[..., Any])


@cache
def _placed() -> None:
    from windtunnel.base import numba_cache  # a policy, which may be compiled, touches no disk itself

    numba_cache.place()


def jit(function: F) -> F:
    """Compile ``function`` at its first call; the result is kept on disk, and the GIL is let go of in it."""
    _placed()
    return cast(F, _by_type(njit(cache=True, nogil=True)(function)))


def jit_inline(function: F) -> F:
    """As `jit`, but part of its callers: a call would copy the header of every array that it is given."""
    return cast(F, _by_type(njit(nogil=True, forceinline=True)(function)))


def _by_type(compiled: Any) -> Any:
    """A compiled function whose compiled callers do not have it compiled anew for each constant that they
    give: Numba takes 0 for another type than an integer."""
    of_types = compiled.get_call_template

    def of_constants(constants: Any, named: Any) -> Any:
        plain = {name: types.unliteral(constant) for name, constant in dict(named).items()}
        return of_types(tuple(types.unliteral(constant) for constant in constants), plain)

    compiled.get_call_template = of_constants
    return compiled


def c_callable(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function to one with an address that compiled code calls; kept on disk as `jit`'s are."""
    _placed()
    return cast(Callable[[Callable[..., Any]], Any], cfunc(signature, cache=True))
