"""Wasted time from what a real run logged: when which state was reached, and when its checkpoint was whole.

A failure at an instant goes on from the newest state whose checkpoint was whole by then: the work since that
state was reached is lost, and the state has to be got back. GEMINI's mean (section 2) is
``complete + interval / 2 + load``, `policy.interval.wasted`; here the instants are drawn and looked up.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from statistics import mean

from windtunnel.training.elastic.events import Event


@dataclass(frozen=True)
class Save:
    """``reached``: when ``step`` was done; ``whole``: when all ranks' checkpoints of it were
    (time.time())."""

    step: int
    reached: float
    whole: float


def saves_of(events: Sequence[Event], world: int, generation: int = 1) -> list[Save]:
    """The saves that became whole in ``generation``, in order. A step is whole when it was committed, or when
    ``world`` ranks said that theirs is."""
    mine = [event for event in events if event["generation"] == generation]
    reached = {event["step"]: event["ended"] for event in mine if event["kind"] == "step"}
    committed = {event["step"]: event["t"] for event in mine if event["kind"] == "committed"}
    said: dict[int, list[float]] = {}
    for event in mine:
        if event["kind"] == "saved":
            said.setdefault(event["step"], []).append(event["t"])
    whole = {step: max(times) for step, times in said.items() if len(times) == world}
    found = [
        Save(step, reached[step], at)
        for step, at in sorted({**whole, **committed}.items())
        if step in reached
    ]
    return sorted(found, key=lambda save: save.whole)


def instants(saves: Sequence[Save], count: int, seed: int) -> list[float]:
    """Moments drawn evenly from the whole periods that ``saves`` span."""
    random = Random(seed)
    return [random.uniform(saves[0].whole, saves[-1].whole) for _ in range(count)]


def lost_work(saves: Sequence[Save], instant: float) -> float:
    """Seconds of work that a failure at ``instant`` loses."""
    at = bisect_right([save.whole for save in saves], instant) - 1
    return instant - max(save.reached for save in saves[: at + 1])


def complete(saves: Sequence[Save]) -> float:
    """Mean seconds from a state to its whole checkpoint."""
    return mean(save.whole - save.reached for save in saves)


def interval(saves: Sequence[Save]) -> float:
    """Mean seconds between states that were saved."""
    return mean(after.reached - before.reached for before, after in pairwise(saves))
