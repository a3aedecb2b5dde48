"""Over how many steps a checkpoint that goes to peers in idle spans of the network is spread (GEMINI,
section 5).

A training step uses the network the same way each time: between its collectives lie *idle spans* of known
length, of which the ``safety`` share is used. A chunk of s bytes takes ``startup + s / bandwidth``, and is at
most one part of the receiver's staging buffer, so that the next one is received while one is copied away.
"""

from __future__ import annotations

from collections.abc import Sequence


def steps_for(
    spans: Sequence[float],
    nbytes: int,
    copies: int,
    buffer: int,
    parts: int,
    bandwidth: float,
    startup: float,
    safety: float,
) -> int:
    """The fewest steps in whose spans all copies go; 0 where no span has room for anything.

    ``spans``: seconds. ``nbytes``: of one copy. ``copies``: with the one at home, which needs no network.
    ``buffer``: bytes of staging memory, in ``parts`` parts. ``bandwidth``: bytes/s. ``startup``: seconds a
    chunk. ``safety``: the share of a span that is used, in (0, 1].

    Raises:
        ValueError: a number outside its range.
    """
    part = buffer // parts if parts > 0 else 0
    if part < 1 or bandwidth <= 0 or startup < 0 or not 0 < safety <= 1 or nbytes < 0 or copies < 1:
        raise ValueError(
            f"no plan for buffer={buffer}, parts={parts}, bandwidth={bandwidth}, startup={startup}, "
            f"safety={safety}, nbytes={nbytes}, copies={copies}"
        )
    whole = startup + part / bandwidth
    room = 0
    for span in spans:
        chunks, left = divmod(safety * span, whole)
        # what rounding took from a whole byte is given back
        room += int(chunks) * part + max(0, int((left - startup) * bandwidth * (1 + 1e-9) + 1e-9))
    wanted = (copies - 1) * nbytes
    return max(1, -(-wanted // room)) if room else int(not wanted)
