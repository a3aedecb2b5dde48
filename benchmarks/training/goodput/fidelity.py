"""Fidelity: what the twin says of the very runs that were ran, after it was told the cost of each phase.

The costs are medians of the runs with random losses (section recovery); the runs that are compared are
others, those at several rates of loss (section rates). The twin gets the moments at which hosts were lost
there, the time of a step on all hosts and that of a layer (the bench's devices sleep it); layouts, paces,
kept steps and the time to the last step are its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import mean

from benchmarks.harness.measure import median
from benchmarks.harness.rows import Row
from benchmarks.training.goodput.published import RestartOnFewer
from benchmarks.training.pipelines.job import FORWARD, LAYERS, MICROBATCHES, N0
from benchmarks.training.pipelines.measured import SCHEMES, Cell, Recoveries, measure_grid, measure_recoveries
from benchmarks.training.pipelines.runs import CHECKPOINT_EVERY, HOSTS, JobRun, Scheme
from windtunnel.traces.failures import Change
from windtunnel.training.elastic.events import recoveries
from windtunnel.training.goodput.twin import simulate as twin
from windtunnel.training.goodput.twin.model import JobModel, PhaseCosts, SimulationResult
from windtunnel.training.goodput.twin.restart import StorageRestart
from windtunnel.training.goodput.twin.templates import Templates
from windtunnel.training.pipelines.policy.compose import compose, step_seconds


@dataclass(frozen=True)
class Calibration:
    """``stall``: seconds of a checkpoint to storage. ``step_times``: by the number of hosts, as the policy
    predicts them from the one on all hosts."""

    job: JobModel
    costs: PhaseCosts
    stall: float
    step_times: dict[int, float]


def calibrate(found: Recoveries) -> Calibration:
    """The twin's job and costs, from real recoveries."""
    ours = [recovery for _, recovery in found.recoveries("templates")]
    theirs = [recovery for _, recovery in found.recoveries("warm restart")]
    back = [pair for scheme in SCHEMES for pair in found.recoveries(scheme, True)]
    # pauses in which a host was taken in (a rank that is cut off may suspect its peers first)
    events = [event for ran in found.ran["templates", True] for event in ran.events]
    joins = [one.phases for one in recoveries(events) if one.kind != "loss" and one.complete]
    regroup = median([r.phases["regroup"] for r in ours]) or 0.0
    warm = median([r.phases["regroup"] for r in theirs]) or 0.0
    job = _job(found)
    costs = PhaseCosts(
        detect=median(_of(r.phases, ("detect", "decide")) for r in (*ours, *theirs)) or 0.0, regroup=regroup,
        regroup_growth=0.0, start=max(0.0, warm - regroup), blocking_save=True,
        replace=median(_came(ran, recovery.injected) for ran, recovery in back) or math.inf,
        storage_bandwidth=job.state_bytes / (median(r.phases["load"] for r in theirs) or 1.0),
        join=median(_of(phases, ("decide", "regroup")) for phases in joins) or 0.0,
    )  # fmt: skip
    copied = _busiest(found, job, costs) / (median([r.phases["load"] for r in ours]) or 1.0)
    scheme = Templates(job, costs, CHECKPOINT_EVERY)
    unit = step_seconds(scheme.set, compose(scheme.set, range(HOSTS), MICROBATCHES))
    step_times = {
        hosts: job.overhead
        + job.work * step_seconds(scheme.set, compose(scheme.set, range(hosts), MICROBATCHES)) / unit
        for hosts in range(N0, HOSTS + 1)
    }
    return Calibration(job, replace(costs, peer_bandwidth=copied), _stall(found), step_times)


def _job(found: Recoveries) -> JobModel:
    """What a step takes beyond its layers' time is the same on fewer hosts."""
    job = JobModel(HOSTS, found.step_time, _state_bytes(found), N0, MICROBATCHES, LAYERS)
    scheme = Templates(job, PhaseCosts(), CHECKPOINT_EVERY)
    layers = 3 * FORWARD * LAYERS * step_seconds(scheme.set, scheme.layout)
    return replace(job, overhead=max(0.0, found.step_time - layers))


def _of(phases: dict[str, float | None], names: tuple[str, ...]) -> float:
    return sum(phases[name] or 0.0 for name in names)


def _state_bytes(found: Recoveries) -> float:
    """Of all layers, which are alike: told where some were copied."""
    told = [
        e
        for several in found.ran.values()
        for ran in several
        for e in ran.events
        if e["kind"] == "layout" and e["moved"]
    ]
    return LAYERS * max((event["nbytes"] / event["moved"] for event in told), default=1.0)


def _came(ran: JobRun, injected: float | None) -> float | None:
    """Seconds from a loss until a host came."""
    if injected is None:
        return None
    later = [e["t"] - injected for e in ran.events if e["kind"] == "host.joined" and e["t"] > injected]
    return min(later, default=None)


def _stall(found: Recoveries) -> float:
    several = [ran for back in (False, True) for ran in found.ran["warm restart", back]]
    saves = median([seconds for ran in several for seconds in ran.saves()]) or 0.0
    steps = [s for ran in several for times in ran.step_times().values() for s in times]
    return max(0.0, saves - (median(steps) or 0.0))


def _busiest(found: Recoveries, job: JobModel, costs: PhaseCosts) -> float:
    """Bytes that the busiest host sends or receives in one of the recoveries that were measured, mean, as
    the twin counts them."""
    unit = replace(costs, peer_bandwidth=1.0, replace=math.inf)
    counted = []
    for ran in found.ran["templates", False]:
        scheme = Templates(job, unit, CHECKPOINT_EVERY)
        alive = list(range(HOSTS))
        for place in (event["place"] for event in ran.events if event["kind"] == "injected"):
            setback = scheme.lost([alive.pop(place)], False, 0.0)
            assert setback is not None  # the twin's templates notice every loss
            counted.append(dict(setback.phases)["load"])
    return mean(counted) if counted else 1.0


def replay(
    calibration: Calibration, scheme: Scheme, ran: JobRun, back: bool
) -> tuple[SimulationResult, float]:
    """The twin's result through the losses of ``ran``, and when its last step is done (seconds)."""
    job = calibration.job
    costs = calibration.costs if back else replace(calibration.costs, replace=math.inf)
    start = _begin(ran, job.step_time)
    alive = list(range(HOSTS))
    trace = []
    for event in ran.events:
        if event["kind"] == "injected":
            host = alive.pop(event["place"])
            if back:
                # a restart waits and fills the place, shrinking takes the new host in as the last one
                alive.insert(len(alive) if scheme == "templates" else event["place"], host)
            trace.append(Change(event["t"] - start, (host,)))
    horizon = 3.0 * (ran.seconds + ran.steps * job.step_time)
    result = twin.simulate(_made(calibration, costs, scheme, back), job, costs, trace, horizon)
    return result, reached(result, ran.steps)


def _made(
    calibration: Calibration, costs: PhaseCosts, scheme: Scheme, back: bool
) -> Templates | StorageRestart:
    """The twin's scheme for a live one."""
    job = calibration.job
    if scheme == "templates":
        templates = Templates(job, costs, CHECKPOINT_EVERY)
        templates.storage.stall = 0.0  # the live run writes no checkpoints
        return templates
    restart = (
        StorageRestart(job, costs, CHECKPOINT_EVERY)
        if back
        else RestartOnFewer(job, costs, CHECKPOINT_EVERY, calibration.step_times)
    )
    restart.stall = calibration.stall
    return restart


def reached(result: SimulationResult, steps: float) -> float:
    """When ``result`` had done ``steps`` steps for good; infinite if it never had."""
    found = math.inf
    for (t0, done0), (t1, done1) in zip(result.series, result.series[1:], strict=False):
        if done1 < steps:
            found = math.inf
        elif done0 < steps:
            found = t0 + (t1 - t0) * (steps - done0) / (done1 - done0)
    return found


def _begin(ran: JobRun, step_time: float) -> float:
    return ran.times()[0] - step_time


def fidelity_rows(quick: bool) -> Iterator[Row]:
    """Rows of the section."""
    found, grid = measure_recoveries(quick), measure_grid(quick)
    calibration = calibrate(found)
    costs = calibration.costs
    told = (
        f"detect {costs.detect * 1e3:.0f} ms, regroup {costs.regroup * 1e3:.0f} ms,"
        f" start {costs.start * 1e3:.0f} ms, replace {costs.replace:.2f} s, join {costs.join * 1e3:.0f} ms,"
        f" copy {costs.peer_bandwidth / 1e6:.0f} MB/s, storage {costs.storage_bandwidth / 1e6:.0f} MB/s,"
        f" save {calibration.stall * 1e3:.0f} ms,"
        f" of a step {calibration.job.overhead * 1e3:.0f} ms are no layer's"
    )
    errors: dict[Scheme, list[float]] = {scheme: [] for scheme in SCHEMES}
    for scheme in SCHEMES:
        for cell in grid.cells:
            ran = cell.ran[scheme]
            _, end = replay(calibration, scheme, ran, cell.back)
            row = _total(scheme, cell, ran, end, calibration)
            errors[scheme] += [] if row.error is None else [row.error]
            yield row
    for scheme, known in errors.items():
        yield Row(
            "fidelity", f"{scheme}: mean error of the time of a run", "",
            measured=mean(known) if known else None,
            note=f"costs from other runs: {told}",
        )  # fmt: skip


def _total(scheme: Scheme, cell: Cell, ran: JobRun, end: float, calibration: Calibration) -> Row:
    measured = ran.times()[ran.steps - 1] - _begin(ran, calibration.job.step_time)
    back = "back" if cell.back else "not back"
    ideal = ran.steps * calibration.job.step_time
    ends = math.isfinite(end)
    emulated = f"emulated {ideal / end:.1%}" if ends else "in the twin it never ends"
    return Row(
        "fidelity", f"{scheme}, loss every {cell.every} steps, {back}: time of the run", "s",
        measured=measured, emulated=end if ends else None,
        note=f"goodput measured {ideal / measured:.1%}, {emulated}",
    )  # fmt: skip
