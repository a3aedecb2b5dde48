"""Rates and limits as the gap has them, in integers; without the compiler that `gap` loads."""

from __future__ import annotations

SHIFT = 20
"""Rates are in bytes per 2^20 ns, gaps in 2^-20 bytes: what drains in 1 ns is the rate itself, and exact."""
LONGEST = 1 << 32
"""ns, 4.3 s: no longer time drains. With rates below 2^27 no product passes 2^63."""
NEVER = (1 << 32) - 1
"""As ``mark``: nothing is marked."""


def rate_units(rate: float) -> int:
    """Bytes/s as the gap has it; at least 1."""
    return max(1, round(rate * (1 << SHIFT) / 1e9))


def rate_of(units: int) -> float:
    """And back."""
    return units * 1e9 / (1 << SHIFT)
