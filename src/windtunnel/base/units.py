"""Quantities as users write them, and figures as readers want to see them.

Written: plain SI numbers, or numbers with a unit. ``400 Gb/s``, ``80 GiB``, ``2 us`` and ``989 TFLOP/s``
become 5e10, 85899345920, 2e-6 and 9.89e14. A small ``b`` is bits, a large ``B`` bytes; ``GB`` is 10^9 and
``GiB`` 2^30 bytes. Only limits of memory are binary with every prefix (``2G``), as container engines have it.

Shown: times with a prefix of the second, what lies in memory in GiB, what is moved or stored in GB.
"""

from __future__ import annotations

import math
import re

PREFIX = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
SECONDS = {"d": 86400.0, "h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}

NONE = "–"
_PREFIXES = ("B", "KiB", "MiB", "GiB", "TiB")

UNITS: dict[str, dict[str, float]] = {
    "bytes": {f"{prefix}B": factor for prefix, factor in (PREFIX | BINARY).items()},
    "bytes of memory": {
        f"{prefix}{ending}": 1024.0**power
        for power, letter in enumerate(("", "K", "M", "G", "T"))
        for prefix in {letter, letter.lower()}
        for ending in ("", "B", "b", "iB", "ib")
    },
    "bytes/s": {
        **{f"{prefix}B/s": factor for prefix, factor in (PREFIX | BINARY).items()},
        **{f"{prefix}b/s": factor / 8 for prefix, factor in PREFIX.items()},
        **{f"{prefix}bps": factor / 8 for prefix, factor in PREFIX.items()},
        **{f"{prefix}bit": factor / 8 for prefix, factor in PREFIX.items()},
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
    "bytes": "80 GB", "bytes of memory": "512M", "bytes/s": "400 Gb/s", "seconds": "2 us",
    "FLOP/s": "989 TFLOP/s", "watts": "700 W",
}  # fmt: skip


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


def seconds(value: float | None) -> str:
    """``0.00234`` is ``2.34 ms``."""
    if value is None or math.isnan(value):
        return NONE
    size = abs(value)
    if size >= 100:
        return f"{value:,.1f} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if size >= 0.9995 * scale:
            return f"{_digits(value / scale)} {unit}"
    return "0 s" if value == 0 else f"{_digits(value / 1e-9)} ns"


def size(value: float | None, *, places: int | None = None, largest: str = "TiB") -> str:
    """Bytes with a binary prefix: ``82.4 GiB``. ``places``: always so many after the point."""
    if value is None:
        return NONE
    for power in range(_PREFIXES.index(largest), 0, -1):
        if abs(value) >= 0.9995 * 1024**power:
            return f"{_digits(value / 1024**power, places)} {_PREFIXES[power]}"
    return f"{value:,.0f} B"


def amount(value: float) -> str:
    """Bytes with a decimal prefix and no more digits than it needs: ``1.5 GB``, ``12.3 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.4g} TB"


def rate(value: float | None) -> str:
    """Bytes a second with a decimal prefix, as links are sold: ``45.2 GB/s``."""
    return NONE if value is None else f"{decimal(value)}B/s"


def decimal(value: float | None) -> str:
    """A number with a decimal prefix and a space to put a unit after: ``"1.23 T"``."""
    if value is None:
        return NONE
    for power, prefix in ((18, "E"), (15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(value) >= 0.9995 * 10**power:
            return f"{_digits(value / 10**power)} {prefix}"
    return f"{_digits(value)} " if value else "0 "


def share(value: float | None) -> str:
    """``0.412`` is ``41.2 %``."""
    return NONE if value is None else f"{value * 100:.1f} %"


def count(value: float | None) -> str:
    """``5762.3`` is ``5,762``; below 100 one decimal is kept where there is one."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.1f}"


def figure(value: float | None, unit: str) -> str:
    """A figure of the unit: ``s``, ``bytes``, ``share``, or a word to put after the number."""
    formats = {"s": seconds, "bytes": size, "share": share}
    return formats[unit](value) if unit in formats else f"{count(value)} {unit}".rstrip()


def _digits(value: float, places: int | None = None) -> str:
    """Three significant digits where there is a fraction, else the whole number with separators."""
    magnitude = abs(value)
    if places is None:
        places = 0 if magnitude >= 99.95 else 1 if magnitude >= 9.995 else 2
    return f"{value:,.{places}f}"
