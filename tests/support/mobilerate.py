"""A mobile link of a few lines, that drives a policy interval by interval; and a live run that is logged."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from windtunnel.network.mobilerate import live
from windtunnel.network.mobilerate.live.place import missing
from windtunnel.network.mobilerate.policy import (
    POLICIES,
    Ack,
    Decision,
    Observation,
    RateHistory,
    RateSettings,
)
from windtunnel.store import eventlog
from windtunnel.traces.bandwidth import GENERATORS

BASE = 0.02


def driven(
    policy: str,
    draw: np.random.Generator,
    intervals: int,
    settings: RateSettings = RateSettings(),  # noqa: B008
) -> Iterator[tuple[Observation, Decision]]:
    """Each interval's observation and decision, over a link whose rate walks, and stops at times."""
    memory, last, credit, received, rate = RateHistory(), -1, 0.0, 0, 400.0
    queue, back = deque[tuple[int, float]](), deque[Ack]()
    for turn in range(intervals):
        now, acks = turn * settings.delta, list[Ack]()
        while back and back[0].at <= now:
            acks.append(back.popleft())
        observation = Observation(settings, tuple(acks), last, memory)
        decision = POLICIES[policy](observation)
        yield observation, decision
        memory, credit = decision.memory, credit + decision.rate * settings.delta / settings.packet
        while credit >= 1:
            last, credit = last + 1, credit - 1
            queue.append((last, now))
        rate = min(max(rate + draw.normal(0, 25), 0.0), 800.0)
        for _ in range(min(draw.poisson(rate * settings.delta), len(queue))):
            received += 1
            back.append(Ack(*queue.popleft(), now + BASE, received))


def recorded(folder: Path) -> Path:
    """The log of a live sender; skips, by name, where there can be none."""
    if (why := missing()) is not None:
        pytest.skip(why)
    log = folder / eventlog.NAME
    trace = GENERATORS["driving"](3.0, np.random.default_rng(1))
    report = live._once(trace, "sira-h", 3.0, live.USUAL, 0, log)
    assert report[0].rate > 0
    return log
