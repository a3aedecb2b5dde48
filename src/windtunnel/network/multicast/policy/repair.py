"""What a rack does about packets that it lacks: whom it asks for them, when, and when that is in vain.

Packets keep their order on the way, so one that is older than what has come is lost. Who feeds the rack has
it, or is asking for it itself and will relay it: a rack far from the source therefore waits longer, and what
is lost near the source is asked for once and not by all that listen there. Where nothing later has come the
rest may only be late: that is waited for `LATE` times as long. From the second time on the source and the
feeder are asked in turn.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST, TRIES, LATE = 256, 40, 10
"""Packets that are asked for at once; how often in vain; see above."""
WAIT, GIVE_UP = -1, -2


@dataclass(frozen=True)
class MissingPackets:
    """A rack that lacks ``missing`` (numbers, the lowest `MOST`; ``lost``: later ones have come) of what
    ``source`` sends, and listens to ``feeder`` at ``hop``. ``quiet``: seconds since it knows, or has
    asked; ``asked``: how often since something of it came; ``patience``: seconds that a hop may take;
    ``gone``: racks that do not answer."""

    source: int
    feeder: int
    hop: int
    missing: tuple[int, ...]
    lost: bool
    quiet: float
    asked: int
    patience: float
    gone: tuple[int, ...] = ()


@dataclass(frozen=True)
class RepairDecision:
    """The rack to ask for ``packets``, or `WAIT`, or `GIVE_UP`."""

    ask: int
    packets: tuple[int, ...] = ()


def repair(lacking: MissingPackets) -> RepairDecision:
    """Whom to ask for what, now."""
    times = (
        2 ** min(lacking.asked, 3) if lacking.asked else lacking.hop if lacking.lost else lacking.hop * LATE
    )
    if lacking.quiet < lacking.patience * times:
        return RepairDecision(WAIT)
    able = [rack for rack in (lacking.feeder, lacking.source) if rack not in lacking.gone]
    if lacking.asked >= TRIES or not able:
        return RepairDecision(GIVE_UP)
    return RepairDecision(able[lacking.asked % len(able)], lacking.missing[:MOST])
