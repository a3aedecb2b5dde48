"""How many packets each entity may have under way, so that the host's own queue stays between two marks.

As published: when the queue is longer than ``upper`` packets, all entities together get a window of what the
line holds (round trip times rate) and ``lower`` packets more. An entity's part goes by its weight and by
what it sent; its flows get equal windows, and what is left over goes round. Between, flows are CUBIC's. That
is `published`.

`decide` differs, each time because a trial showed the need:

- A window stays in force, and is corrected by the queue that it leaves: what is under way and does not wait
  is on the line, so the next window is that and ``lower`` packets (a quarter of the way up, at once down,
  never below the published one). A line with a longer round trip than was said is filled. It ends when nobody
  sends.
- Published parts are proportional to weight times what was sent, and what is sent follows the part: with
  weights that differ all ends with one. Here parts go by weights among those that want more than they have
  (max-min), and who takes less than half of its share is not held back.
- A flow with less than two packets would wait for acknowledgements that receivers delay. It has four, and is
  paced at its part of the line, a little more or less as the queue is short or long.

Source: CLUSTER 2016, doi 10.1109/CLUSTER.2016.23, section on the mechanism.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from windtunnel.network.sharing.policy import fill

BUSY = 0.5
"""Of its share of the line; who sends less is not held back, and left twice what it sends."""
UP = 4
NEEDLESS = 64
"""A window so many times the published one holds nobody back: it ends."""
LEAST, PACED = 2, 4
"""Packets of a flow: a receiver acknowledges every second one at once; and of one that is paced, so that late
acknowledgements do not stop it."""
SWING, SLOWEST, FASTEST = 96.0, 0.5, 1.125
"""Pacing changes by one ``SWING``-th for each packet that the queue is off ``lower``, and stays within these:
by parts of ``lower`` a short queue would swing so hard that it is often empty."""


@dataclass(frozen=True)
class WindowTenant:
    """``sent``: packets a second, over the last turns. ``flows``: that sent lately. ``turn``: the flow at
    which the last round of what is left over ended."""

    name: str
    weight: float = 1.0
    sent: float = 0.0
    flows: int = 0
    turn: int = 0


@dataclass(frozen=True)
class WindowSettings:
    """``line``: bytes/s. ``trip``: seconds of a round trip when nothing waits. ``packet``: bytes. ``upper``,
    ``lower``: packets in the host's queue (the paper's T_u and T_l)."""

    line: float
    trip: float
    packet: int = 1500
    upper: int = 8
    lower: int = 3

    @property
    def least(self) -> int:
        """Packets: the window of a line that is full, with ``lower`` in the queue."""
        return int(self.trip * self.line / self.packet) + self.lower


@dataclass(frozen=True)
class Observation:
    """``backlog``: packets in the queue now. ``total``: the window in force, 0 for none."""

    settings: WindowSettings
    backlog: float
    total: int
    entities: tuple[WindowTenant, ...]


@dataclass(frozen=True)
class WindowShare:
    """What the ``flows`` of an entity have: ``window`` packets in all; with a ``pace`` (bytes/s of each) they
    have `PACED` each. No flows: nobody is held back."""

    window: int = 0
    flows: int = 0
    turn: int = 0
    pace: float | None = None

    @property
    def free(self) -> bool:
        return not self.flows

    @property
    def each(self) -> tuple[int, int]:
        """Packets of every flow, and how many flows have one more, from number ``turn`` on."""
        return (PACED, 0) if self.pace is not None else divmod(self.window, max(self.flows, 1))

    def of_flow(self, number: int) -> int:
        """Packets of flow ``number``."""
        floor, more = self.each
        return floor + ((number - self.turn) % max(self.flows, 1) < more)


@dataclass(frozen=True)
class Decision:
    """``total``: packets, 0: nobody is held back. A share for each entity, in their order."""

    total: int
    shares: tuple[WindowShare, ...]


def decide(observation: Observation) -> Decision:
    """Windows by weights, of those that want more than they have."""
    total = _total(observation)
    if not total:
        return free(observation)
    pairs = zip(observation.entities, _by_weight(observation), strict=True)
    return Decision(total, tuple(_share(observation, total, entity, part) for entity, part in pairs))


def published(observation: Observation) -> Decision:
    """Windows by weight times what was sent, as printed, and only while the queue is too long."""
    whole = sum(tenant.weight * tenant.sent for tenant in observation.entities)
    if observation.backlog <= observation.settings.upper or not whole:
        return free(observation)
    total, shares = observation.settings.least, []
    for entity in observation.entities:
        window = int(total * entity.weight * entity.sent / whole + 1e-9)
        flows = max(entity.flows, 1)
        shares.append(WindowShare(window, flows, entity.turn % flows, None) if entity.sent else WindowShare())
    return Decision(total, tuple(shares))


def free(observation: Observation) -> Decision:
    """Nobody is held back."""
    return Decision(0, (WindowShare(),) * len(observation.entities))


def _total(observation: Observation) -> int:
    """The window of all together."""
    settings, least = observation.settings, observation.settings.least
    if not any(entity.sent for entity in observation.entities):
        return 0
    if not observation.total:
        return least if observation.backlog > settings.upper else 0
    off = settings.lower - observation.backlog
    if observation.backlog > settings.upper:
        return max(least, observation.total + int(off))
    paced = observation.total < LEAST * sum(entity.flows for entity in observation.entities)
    total = observation.total + (max(1, int(off / UP)) if off > 0 and not paced else 0)
    return total if total <= NEEDLESS * least else 0


def _by_weight(observation: Observation) -> Sequence[float | None]:
    """Parts of the line, of 1; None: not held back."""
    line = observation.settings.line / observation.settings.packet
    weights = sum(entity.weight for entity in observation.entities if entity.sent)
    busy = [
        entity.sent > BUSY * line * entity.weight / weights if entity.sent else False
        for entity in observation.entities
    ]
    demands = [
        float("inf") if wants else entity.sent / BUSY
        for wants, entity in zip(busy, observation.entities, strict=True)
    ]
    filled = fill(line, tuple(entity.weight for entity in observation.entities), demands)
    return [part / line if wants else None for wants, part in zip(busy, filled, strict=True)]


def _share(observation: Observation, total: int, entity: WindowTenant, part: float | None) -> WindowShare:
    if part is None:
        return WindowShare()
    settings, flows = observation.settings, max(entity.flows, 1)
    window = int(total * part + 1e-9)
    if window >= LEAST * flows:
        return WindowShare(window, flows, entity.turn % flows)
    swing = 1.0 + (settings.lower - observation.backlog) / SWING
    return WindowShare(window, flows, 0, settings.line * part * min(max(swing, SLOWEST), FASTEST) / flows)


POLICIES: Mapping[str, Callable[[Observation], Decision]] = {
    "weights": decide,
    "published": published,
    "free": free,
}
