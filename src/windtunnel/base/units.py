"""Quantities as users write them in cluster files: plain SI numbers, or numbers with a unit.

``400 Gb/s``, ``80 GiB``, ``2 us`` and ``989 TFLOP/s`` become 5e10, 85899345920, 2e-6 and 9.89e14. A small
``b`` is bits, a large ``B`` bytes.
"""

from __future__ import annotations

import math
import re

PREFIX = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
SECONDS = {"d": 86400.0, "h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}

UNITS: dict[str, dict[str, float]] = {
    "bytes": {f"{prefix}B": factor for prefix, factor in (PREFIX | BINARY).items()},
    "bytes/s": {
        **{f"{prefix}B/s": factor for prefix, factor in (PREFIX | BINARY).items()},
        **{f"{prefix}b/s": factor / 8 for prefix, factor in PREFIX.items()},
        **{f"{prefix}bps": factor / 8 for prefix, factor in PREFIX.items()},
    },
    "seconds": SECONDS,
    "FLOP/s": {
        f"{prefix}{unit}": factor
        for prefix, factor in PREFIX.items()
        for unit in ("FLOP/s", "FLOPS", "OP/s", "OPS")
    },
    "watts": {f"{prefix}W": factor for prefix, factor in PREFIX.items()},
}
EXAMPLES = {
    "bytes": "80 GB",
    "bytes/s": "400 Gb/s",
    "seconds": "2 us",
    "FLOP/s": "989 TFLOP/s",
    "watts": "700 W",
}


def parse_quantity(value: object, unit: str, *, zero: bool = False) -> float:
    """``value`` (number or text) in ``unit``, a key of `UNITS`; with ``zero`` 0 is accepted too.

    Raises ValueError whose message says what is accepted.
    """
    lowest = "a number from 0 up" if zero else "a positive number"
    accepted = f"accepted is {lowest} of {unit}, or text such as '{EXAMPLES[unit]}'"
    number: float | None = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value)
    elif isinstance(value, str):
        match = re.fullmatch(r"\s*([+-]?[\d.]+(?:[eE][+-]?\d+)?)\s*(\S*)\s*", value)
        factor = 1.0 if match and not match[2] else UNITS[unit].get(match[2]) if match else None
        try:
            number = float(match[1]) * factor if match and factor else None
        except ValueError:
            number = None  # such as "1.2.3"
    if number is None or not math.isfinite(number) or number < 0 or (number == 0 and not zero):
        raise ValueError(accepted)
    return number
