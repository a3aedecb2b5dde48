"""For `preloaded`: Numba knows its types and has LLVM, which the first call in a process waits for."""

from __future__ import annotations

import numba


@numba.njit  # type: ignore[untyped-decorator]
def first(count: int) -> int:
    return count + 1


first(1)
