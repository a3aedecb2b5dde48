"""The forecast of ``windtunnel plan resilience`` against a run of our own that random faults strike.

First a short phase of calibration (`calibrated`), then the plan: `goodput.plan` with what was measured
(``--costs``) and the rates of the faults, drawn many times over, since one draw of so few failures says
little. The job is then run with what the plan recommends for checkpoints in memory, and struck (`storm`).

Two comparisons. *At the rate*: the mean of the draws against the run, which had one draw of its own; the band
of 5 to 95 % says how far luck reaches. *Replayed*: the twin goes through the very faults that struck, which
leaves out the luck. Goodput is steps that were kept times the time of a step without checkpoints, as it was
measured before, over all time: steps that other work on this computer slows down count against the forecast.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from benchmarks.harness import jobs
from benchmarks.harness.measure import conditions, quantile, scratch
from benchmarks.harness.rows import Row, left_out
from benchmarks.training.elastic import storm
from benchmarks.training.elastic.calibrated import Calibrated, calibrate
from benchmarks.training.elastic.storm import HOSTS, KINDS, MTBF, Interruption, Struck
from windtunnel.linux import network
from windtunnel.traces.failures import Change
from windtunnel.training.elastic.events import Event
from windtunnel.training.goodput.model import MEMORY, SimulationResult
from windtunnel.training.goodput.planning import Plan, plan, through
from windtunnel.training.goodput.request import PlanRequest

SECTION = "forecast"
MINUTES, QUICK_MINUTES = 30.0, 1.5
DRAWS = 200
SEED = 30  # of the faults that strike; the plan's are 0 up to `DRAWS`
WITHIN = 0.05
SHARES = {kind.name: kind.share for kind in KINDS}


@dataclass(frozen=True)
class Weathered:
    """A run of ``seconds``. ``kept``: steps that stood at its end. ``done``: all that were finished, again or
    for the first time. ``pace``: mean seconds of one that nothing struck."""

    seconds: float
    begin: float
    kept: int
    done: int
    pace: float
    struck: tuple[Struck, ...]
    interruptions: tuple[Interruption, ...]

    @property
    def redone(self) -> int:
        return self.done - self.kept


def forecast_rows(quick: bool, minutes: float | None = None) -> Iterator[Row]:
    """Rows of the section. ``minutes``: of the run."""
    reason = network.missing()
    if reason is not None:
        yield left_out(SECTION, "own run", f"no networks can be emulated here: {reason}")
        return
    load, seconds = conditions(), 60.0 * (minutes or (QUICK_MINUTES if quick else MINUTES))
    with scratch() as folder:
        known = calibrate(folder, 1 if quick else 3, 80 if quick else 240)
        plans = [planned(folder, known, seconds, seed) for seed in range(DRAWS)]
        ran = weather(folder, plans[0], seconds)
    yield from rows(known, plans, ran, f"{load}, {os.getloadavg()[2]:.1f} over the last 15 min of the run")


def planned(folder: Path, known: Calibrated, seconds: float, seed: int) -> Plan:
    """What the plan says, of what is known beforehand; the measured costs go before those in its options."""
    costs = folder / "costs.json"
    costs.write_text(json.dumps(known.costs(SHARES)))
    by = {reach: sum(kind.share for kind in KINDS if kind.reach == reach) for reach in ("host", "leaf")}
    hosts = by["host"] + by["leaf"]
    return plan(
        PlanRequest(
            cluster=f"cpu:{HOSTS}x1", state_bytes=f"{known.state:.0f}", mtbf=f"{MTBF}",
            step_time=f"{known.step}", days=seconds / 86_400, software=1.0 - hosts,
            leaf_share=by["leaf"] / hosts, replace="1s", spares=0, detect="1s", start="1s",
            storage="1 GB/s", host_memory="1 GB", network_share=1.0, stages=1, layers=4, costs=costs,
            seed=seed,
        )
    )  # fmt: skip


def weather(folder: Path, made: Plan, seconds: float) -> Weathered:
    """The job, run as the plan says, struck for so long.

    Raises:
        jobs.Failed: it did not outlive that.
    """
    chosen = made.advice.chosen
    settings = {
        "copies": chosen.copies, "placement": chosen.placement.kind, "every": chosen.every,
        "persist": str(folder / "storage"), "persist_every": chosen.storage_every,
    }  # fmt: skip
    with storm.job(folder / "run", settings) as job:
        jobs.until(job, lambda events: jobs.count(events, "persisted") > 0, "in storage", 300.0)
        begin = job.events()[-1]["t"]
        struck = storm.storm(job, storm.drawn(seconds, SEED), begin, seconds)
        return weathered(job.events(), struck, begin, seconds)


def weathered(events: Sequence[Event], struck: Sequence[Struck], begin: float, seconds: float) -> Weathered:
    """What the log says of those seconds."""
    done = storm.steps(events, begin, begin + seconds)
    first = max(event["step"] for event in events if event["kind"] == "step" and event["t"] <= begin)
    kept = done[-1]["step"] - first if done else 0
    found = [
        one
        for one in storm.interruptions(events, struck)
        if (one.recovery.injected or 0.0) > begin and (one.recovery.first_step or 0.0) <= begin + seconds
    ]
    times = [seconds for _, seconds in jobs.paces(done)]
    return Weathered(
        seconds, begin, kept, len(done), mean(times) if times else 0.0, tuple(struck), tuple(found)
    )


def replayed(known: Calibrated, made: Plan, ran: Weathered) -> SimulationResult:
    """The twin through the strikes of ``ran``, each at its time."""
    hit = [one for one in ran.struck if one.found]
    changes = [
        Change(one.t - ran.begin, tuple(range(HOSTS)) if one.kind.reach == "leaf" else (one.rank,),
               software=one.kind.reach == "processes", cause=one.kind.name)
        for one in hit
    ]  # fmt: skip
    often = {name: float(count) for name, count in Counter(one.kind.name for one in hit).items()}
    return through(made, changes, known.costs(often))


def rows(known: Calibrated, plans: Sequence[Plan], ran: Weathered, load: str) -> Iterator[Row]:
    """The figures of ``ran`` beside those that were forecast."""
    made, minutes = plans[0], f"{ran.seconds / 60:g} min"
    draws = sorted(one.goodput for made in plans for one in made.advice.results if one.scheme == MEMORY)
    again, chosen = replayed(known, made, ran), made.advice.chosen
    low, high = quantile(draws, 0.05), quantile(draws, 0.95)
    measured = ran.kept * known.step / ran.seconds
    yield _goodput(
        f"own run of {minutes}, goodput at the rate of the faults", measured, mean(draws),
        f"mean of {len(draws)} draws; 5 to 95 % of them: {low:.1%} to {high:.1%}, the run is"
        f" {'inside' if low <= measured <= high else 'outside'}; {len(ran.struck)} strikes,"
        f" {sum(not one.found for one in ran.struck)} found nobody; {HOSTS} hosts, a strike every {MTBF:g} s"
        f" on average, a host comes after {storm.REPLACE_AFTER:g} s; as planned for peer memory:"
        f" {chosen.copies} copies, to memory every {chosen.every} steps, to storage every"
        f" {chosen.storage_every}; {load}",
    )  # fmt: skip
    yield _goodput(
        f"own run of {minutes}, goodput with the very faults that struck", measured, again.goodput,
        f"the twin through the same faults at the same times; a step took {ran.pace * 1e3:.0f} ms in the run"
        f" with its checkpoints, {known.step * 1e3:.0f} ms without beforehand",
    )  # fmt: skip
    yield Row(SECTION, "… steps kept", "steps", measured=ran.kept, emulated=again.steps)
    yield Row(SECTION, "… steps done again", "steps", measured=ran.redone, emulated=again.redone)
    stored = sum("storage" in one.recovery.tiers.values() for one in ran.interruptions)
    yield Row(SECTION, "… recoveries from storage", "", measured=stored, emulated=again.from_storage)
    for kind in KINDS:
        alone = [one.seconds for one in ran.interruptions if [s.kind for s in one.struck] == [kind]]
        yield Row(
            SECTION, f"{kind.name}: seconds without a step, mean", "s",
            measured=mean(alone) if alone else None, emulated=known.cost(kind.name),
            note=f"of {len(alone)} that struck alone; forecast: of {len(known.strikes[kind.name])}",
        )  # fmt: skip


def _goodput(name: str, measured: float, emulated: float, note: str) -> Row:
    return Row(
        SECTION, name, "", measured=measured, emulated=emulated, target=f"≤ {WITHIN:.0%} error",
        met=abs(emulated - measured) <= WITHIN * measured, note=note,
    )  # fmt: skip
