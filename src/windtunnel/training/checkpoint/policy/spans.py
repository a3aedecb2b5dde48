"""Over how many steps a checkpoint that goes to peers in idle spans of the network is spread (GEMINI,
section 5).

A training step uses the network the same way each time: between its collectives lie *idle spans* of known
length, of which the ``safety`` share is used. A chunk of s bytes takes ``startup + s / bandwidth``, and is at
most one part of the receiver's staging buffer, so that the next one is received while one is copied away. The
slowest rank's number holds for all: a step that only some of them save is never committed.
"""

from __future__ import annotations

from dataclasses import dataclass

from windtunnel.training.checkpoint.policy.pacing import LONGEST


@dataclass(frozen=True)
class NetworkProfile:
    """What a rank knows of its network: the idle ``spans`` of a step (s), the bytes of one copy of its shard,
    and the bandwidth (bytes/s; None: not known yet)."""

    spans: tuple[float, ...]
    nbytes: int
    bandwidth: float | None


@dataclass(frozen=True)
class Profiles:
    """Of all ``ranks``. ``copies``: of each shard, with the one at home, which needs no network. ``buffer``:
    bytes of staging memory, in ``parts`` parts. ``startup``: seconds a chunk. ``safety``: the share of a span
    that is used, in (0, 1]."""

    ranks: tuple[NetworkProfile, ...]
    copies: int
    buffer: int
    parts: int
    startup: float
    safety: float


@dataclass(frozen=True)
class Spread:
    """A checkpoint is made ``every`` so many steps. ``always``: some rank has no span with room for anything,
    so copies are sent beside training's traffic."""

    every: int
    always: bool = False


def spread(now: Profiles) -> Spread:
    """The fewest steps in whose spans all copies of each rank go."""
    steps = [_steps(now, rank) for rank in now.ranks]
    return Spread(1, always=True) if 0 in steps else Spread(max(steps))


def _steps(now: Profiles, rank: NetworkProfile) -> int:
    """Those of one rank; 0 where no span has room."""
    if rank.bandwidth is None:
        return 1
    part = max(1, min(now.buffer // now.parts, int(LONGEST * rank.bandwidth)))
    whole = now.startup + part / rank.bandwidth
    room = 0
    for span in rank.spans:
        chunks, left = divmod(now.safety * span, whole)
        # what rounding took from a whole byte is given back
        last = int((left - now.startup) * rank.bandwidth * (1 + 1e-9) + 1e-9)
        room += int(chunks) * part + max(0, last)
    nbytes = (now.copies - 1) * rank.nbytes
    return max(1, -(-nbytes // room)) if room else int(not nbytes)
