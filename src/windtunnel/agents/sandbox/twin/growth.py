"""How large the store of one host gets, turn by turn, under the live rule of retention.

The manifests are real ones, made from emulated checkpoints, and ``forgettable`` says which go. Of one
sandbox's images the oldest kept is stored whole, each later one adds what it changed; the same holds for
snapshots of files, over the image that all share. Memory that one image and a later one both change is
counted once for each: the figure is an upper bound.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from windtunnel.agents.sandbox.costs import Costs
from windtunnel.agents.sandbox.model import FilesPart, ImagePart, Manifest, Spec, TurnClass
from windtunnel.agents.sandbox.policy import Retention, forgettable
from windtunnel.agents.sandbox.twin.setup import Made


@dataclass(frozen=True)
class Growth:
    """Bytes after so many seconds: what the store holds, and what was written to it until then."""

    policy: str
    at: float
    stored: float
    written: float
    checkpoints: int


def growth(
    policy: str, made: Iterable[Made], costs: Costs, retention: Retention, *, points: int = 40
) -> list[Growth]:
    """The store over time. As on a live host, retention is applied after every ``keep`` checkpoints."""
    events = sorted(made, key=lambda one: (one.at, one.box, one.turn))
    every = max(1, len(events) // points)
    manifests: dict[str, Manifest] = {}
    facts: dict[str, Made] = {}
    tips: dict[str, str] = {}
    rows, written = [], 0.0
    for place, one in enumerate(events, 1):
        name, parent = f"{one.box:06}-{one.turn:06}", manifests.get(tips.get(str(one.box), ""))
        manifests[name] = _manifest(name, one, parent)
        facts[name] = one
        tips[str(one.box)] = name
        written += one.written
        if place % retention.keep == 0:
            for dropped in forgettable(manifests.values(), tips, retention)[0]:
                del manifests[dropped]
        if place % every == 0 or place == len(events):
            stored = _stored(manifests, facts, costs)
            rows.append(Growth(policy, one.at, stored, written, len(manifests)))
    return rows


def _manifest(name: str, one: Made, parent: Manifest | None) -> Manifest:
    files = (
        FilesPart(name, "btrfs") if one.turn_class >= TurnClass.FILES else parent.files if parent else None
    )
    image = parent.image if parent else None
    if one.turn_class is TurnClass.FULL:
        image = ImagePart(name, 0, (), (), (), 0, 0)
    return Manifest(
        id=name,
        box=str(one.box),
        turn=one.turn,
        parent=parent.id if parent else None,
        turn_class=one.turn_class,
        reasons=(),
        created=one.at,
        files=files,
        image=image,
        shells=(),
        spec=Spec(str(one.box)),
        covered=(),
        not_covered=(),
    )


def _stored(manifests: dict[str, Manifest], facts: dict[str, Made], costs: Costs) -> float:
    """Bytes of the parts that some manifest needs."""
    parts = {part.id for manifest in manifests.values() for part in (manifest.files, manifest.image) if part}
    oldest: dict[int, Made] = {}
    total = 0.0
    for part in sorted(parts):
        one = facts[part]
        if one.turn_class is TurnClass.FULL and one.box not in oldest:
            # it holds everything, not only what changed before it
            oldest[one.box] = one
            total += max(one.written, costs.new_per_byte * (costs.image_base + one.memory))
        else:
            total += one.written
    return total
