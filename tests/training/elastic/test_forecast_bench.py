"""The forecast of a run of our own: what strikes, what is read from the log, and what the twin is told.

The job itself is run by `python -m benchmarks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.training.elastic import forecast, storm
from benchmarks.training.elastic.calibrated import EVERY, PERSIST_EVERY, Calibrated, _steps
from benchmarks.training.elastic.storm import HOSTS, KINDS, Interruption, Struck
from windtunnel.traces.failures import Change
from windtunnel.training.elastic.events import Recovery
from windtunnel.training.goodput.model import MEMORY
from windtunnel.training.goodput.planning import through

SECONDS = {"trainer killed": 0.9, "trainer stopped": 2.0, "host lost with its memory": 5.6}
SECONDS |= {"agent killed": 5.4, "all hosts lost at once": 6.5}


def interruption(seconds: float, back: float = 0.8) -> Interruption:
    none: dict[str, Any] = dict.fromkeys(("injected", "decided", "grouped", "loaded", "first_step", "newest"))
    recovery = Recovery("loss", 2, 1, "", (), None, detected=0.0, resumed=None, steps_lost=0, **none)
    return Interruption((), recovery, seconds - back, back, 0.1)


KNOWN = Calibrated(
    0.3, 0.15, 0.03, 0.14, 0.16, 964e3, {name: (interruption(s),) for name, s in SECONDS.items()}
)


def event(kind: str, t: float, generation: int = 1, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "t": t, "generation": generation, **fields}


def steps(numbers: Sequence[int], begin: float, generation: int) -> list[dict[str, Any]]:
    """One a second."""
    return [event("step", begin + at, generation, step=n, rank=0) for at, n in enumerate(numbers)]


def log() -> list[dict[str, Any]]:
    """Ten steps, a loss that takes four seconds and two of the steps, and eight more."""
    return [
        event("decided", 99.0, reason=""),
        *steps(range(10), 100.0, 1),
        event("lost", 109.7, what="host", host=1, place=1, rank=None, evidence="connection"),
        event("decided", 112.5, 2, reason=""),
        *(event("arrived", 112.8, 2, rank=rank) for rank in range(HOSTS)),
        *(event("grouped", 113.0, 2, rank=rank) for rank in range(HOSTS)),
        *(event("restored", 113.2, 2, rank=rank, tier="peer", step=7) for rank in range(HOSTS)),
        *steps(range(8, 18), 114.5, 2),
    ]


HIT = Struck(KINDS[2], 1, 109.5)


def test_steps_time_and_causes_of_a_run_are_read_from_its_log() -> None:
    gone = Struck(KINDS[0], 0, 111.0, found=False)  # while nobody was there
    ran = forecast.weathered(log(), [HIT, gone], begin=102.0, seconds=20.0)
    assert (ran.kept, ran.done, ran.redone, ran.pace) == (13, 15, 2, 1.0)
    (found,) = ran.interruptions
    assert found.struck == (HIT,)
    assert (found.known, found.back) == pytest.approx((3.0, 1.0))  # its first step took a second of its own
    assert found.regroup == pytest.approx(0.2)
    before = forecast.weathered(log(), [HIT], begin=102.0, seconds=11.0)
    assert (before.kept, before.interruptions) == (7, ())


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.name)
def test_one_fault_costs_in_the_twin_what_it_cost_when_it_was_measured(
    kind: storm.Kind, tmp_path: Path
) -> None:
    """Beside the steps that are done again: the phases of the plan are made of the strikes."""
    made = forecast.planned(tmp_path, KNOWN, 600.0, 0)
    lost = tuple(range(HOSTS)) if kind.reach == "leaf" else (1,)
    change = Change(300.0, lost, software=kind.reach == "processes")
    found = through(made, [change], KNOWN.costs({kind.name: 1.0}))
    away = sum(found.phases[name] for name in ("detect", "wait", "start", "regroup", "load"))
    # the kinds of hosts that go one by one share a wait, the leaf's load is what is beyond it
    near = 0.0 if kind.reach != "leaf" else 0.2
    assert away == pytest.approx(SECONDS[kind.name], abs=0.01 + near)
    assert found.from_storage == (kind.reach == "leaf") and found.failures == 1


def test_what_a_checkpoint_costs_is_found_beside_the_steps_without_one() -> None:
    done, t = [event("step", 0.0, step=-1)], 0.0
    for step in range(400):
        number = step + 1
        t += 0.3 + 0.1 * (number % EVERY == 1) + 0.06 * (number % PERSIST_EVERY == 2)
        done.append(event("step", t, step=step))
    assert _steps(done) == pytest.approx((0.3, 0.1, 0.06))


def test_a_forecast_misses_by_more_than_five_percent_or_not(tmp_path: Path) -> None:
    plans = [forecast.planned(tmp_path, KNOWN, 60.0, seed) for seed in range(20)]
    assert all(any(one.scheme == MEMORY for one in made.advice.results) for made in plans)
    again = forecast.replayed(KNOWN, plans[0], forecast.Weathered(60.0, 100.0, 0, 0, 0.3, (HIT,), ()))
    assert again.failures == 1 and again.phases["wait"] == pytest.approx(4.8, abs=0.5)
    for share, met in ((1.0, True), (0.9, False)):
        kept = round(again.steps * share)
        ran = forecast.Weathered(60.0, 100.0, kept, kept + 2, 0.3, (HIT,), (interruption(5.6),))
        rows = {row.name: row for row in forecast.rows(KNOWN, plans, ran, "quiet")}
        replay = next(row for name, row in rows.items() if name.endswith("the very faults that struck"))
        assert replay.met is met and replay.measured == pytest.approx(kept * 0.3 / 60.0)
        assert rows["… steps done again"].measured == 2
        at_rate = next(row for name, row in rows.items() if name.endswith("the rate of the faults"))
        assert "mean of 20 draws" in at_rate.note
