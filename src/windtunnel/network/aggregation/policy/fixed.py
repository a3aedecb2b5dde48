"""Floats as integers that a switch can add: blocks of one packet, with one exponent for all workers.

All workers first agree on the largest exponent of each block (a maximum, which the switch finds as it finds
sums). A value is then multiplied by the same power of two everywhere and rounded to int32, so the sum is the
exact sum of the rounded values, in whatever order packets come. ``headroom`` bits are left free for the sum:
log2 of the number of workers and nothing can saturate; with fewer, values keep more bits, a sum that does not
fit is marked, and the block goes again as floats, past the switch. So does a block with inf or nan.

Source: block floating point as in SwitchML (NSDI 2021, section 3.7); saturation and repeat as in ATP.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.compiled import jit, jit_inline

VALUES = 352
"""Of one packet, and so of one block."""
LEAST = -149
"""The exponent of the smallest float32, and of blocks of zeros."""
UNFIT = 1 << 20
"""As a block's exponent: it has inf or nan."""
HIGHEST, LOWEST = 2**31 - 1, -(2**31)


@jit
def exponents(values: NDArray[np.float32], out: NDArray[np.int32]) -> None:
    """Of each block the least e with all ``abs(values)`` < 2^e."""
    for block in range(len(out)):
        most = np.float32(0.0)
        fit = True
        for value in values[block * VALUES : (block + 1) * VALUES]:
            fit &= math.isfinite(value)
            most = max(most, abs(value))
        out[block] = UNFIT if not fit else max(math.frexp(most)[1], LEAST) if most > 0 else LEAST


def headroom(workers: int) -> int:
    """Bits with which no sum of so many workers saturates."""
    return max(workers - 1, 0).bit_length()


@jit_inline
def scale(exponent: int, room: int) -> float:
    """What values of a block are multiplied with."""
    return math.ldexp(1.0, 30 - room - exponent)


@jit
def to_fixed(values: NDArray[np.float32], factor: float, out: NDArray[np.int32]) -> None:
    """``values`` times ``factor``, rounded to even; what is lacking of ``out`` is 0."""
    for place in range(len(values)):
        out[place] = np.int32(np.rint(values[place] * factor))
    for place in range(len(values), len(out)):
        out[place] = 0


@jit
def from_fixed(sums: NDArray[np.int32], factor: float, out: NDArray[np.float32]) -> None:
    """And back."""
    for place in range(len(out)):
        out[place] = np.float32(sums[place] / factor)


@jit
def add(own: Any, other: Any) -> bool:
    """``own`` += ``other`` (int32), held at the ends of int32; whether any sum was."""
    saturated = False
    for place in range(VALUES):
        total: Any = np.int64(own[place]) + np.int64(other[place])
        clamped: Any = min(max(total, LOWEST), HIGHEST)
        saturated |= total != clamped
        own[place] = clamped
    return saturated


@jit
def raise_to(own: Any, other: Any) -> bool:
    """The larger of both."""
    for place in range(VALUES):
        own[place] = max(own[place], other[place])
    return False


@jit
def copy(own: Any, other: Any) -> None:
    """``own`` = ``other`` as far as that goes, then 0; a slice's assignment takes the compiler seconds."""
    for place in range(min(len(own), len(other))):
        own[place] = other[place]
    for place in range(len(other), len(own)):
        own[place] = 0
