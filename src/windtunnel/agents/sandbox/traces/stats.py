"""What a trace or a run looks like in figures: classes, think times, run times."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from windtunnel.agents.sandbox.model import TurnClass
from windtunnel.agents.sandbox.traces.replay import Output
from windtunnel.agents.sandbox.traces.schema import Trace


@dataclass(frozen=True)
class Spread:
    """Count, sum, median and 95th percentile of some seconds; zeros where there are none."""

    count: int = 0
    total: float = 0.0
    median: float = 0.0
    p95: float = 0.0


@dataclass(frozen=True)
class Shares:
    """How many turns are of each class; turns whose class is not known are counted apart."""

    none: int = 0
    shell: int = 0
    files: int = 0
    full: int = 0
    unknown: int = 0

    @property
    def known(self) -> int:
        return self.none + self.shell + self.files + self.full

    def share(self, turn_class: TurnClass) -> float:
        """Part of the turns of known class that are of this one; 0 when none is known."""
        count: int = getattr(self, turn_class.word)
        return count / self.known if self.known else 0.0


@dataclass(frozen=True)
class TraceFigures:
    """The figures of traces; ``run`` is filled from observed outputs."""

    turns: int
    classes: Shares
    think: Spread
    run: Spread


def spread(seconds: Iterable[float]) -> Spread:
    values = sorted(seconds)
    if not values:
        return Spread()
    place = min(len(values) - 1, int(0.95 * len(values)))
    return Spread(len(values), sum(values), statistics.median(values), values[place])


def shares(classes: Iterable[TurnClass | None]) -> Shares:
    """Of true classes, or of those that were decided."""
    counts = Counter("unknown" if one is None else one.word for one in classes)
    return Shares(**counts)


def figures(traces: Sequence[Trace], outputs: Iterable[Output] = ()) -> TraceFigures:
    """The figures of some traces, with the run times of the outputs that were observed."""
    turns = [turn for trace in traces for turn in trace.turns]
    return TraceFigures(
        turns=len(turns),
        classes=shares(turn.true_class for turn in turns),
        think=spread(turn.think for trace in traces for turn in trace.turns[:-1]),
        run=spread(output.seconds for output in outputs),
    )
