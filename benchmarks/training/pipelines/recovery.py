"""Live: the first step after the loss of a host, and the throughput at several rates of loss."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from benchmarks.harness.measure import median
from benchmarks.harness.rows import Row, figure
from benchmarks.training.pipelines.job import FORWARD, LAYERS, MICROBATCH_SIZE, MICROBATCHES
from benchmarks.training.pipelines.measured import SCHEMES, Cell, Recoveries, measure_grid, measure_recoveries
from benchmarks.training.pipelines.runs import CHECKPOINT_EVERY, COMES_AFTER, HOSTS
from windtunnel.training.elastic.events import PHASES, Recovery, recoveries

SAMPLES = MICROBATCHES * MICROBATCH_SIZE  # of a step


def conditions(step_time: float) -> str:
    """What the live figures were measured on."""
    return (
        f"{HOSTS} hosts of one rank on {os.cpu_count()} cores, gloo over loopback; {LAYERS} layers,"
        f" {MICROBATCHES} microbatches, step {step_time * 1e3:.0f} ms, of which a layer's device time"
        f" ({FORWARD * 1e3:g} ms forward, twice that backward, a microbatch) is slept"
    )


def recovery_rows(quick: bool) -> Iterator[Row]:
    """Rows of the section: kills of a host at random steps, no host comes back."""
    found = measure_recoveries(quick)
    yield figure("step, undisturbed", "s", found.step_time, note=conditions(found.step_time))
    for scheme in SCHEMES:
        yield from _scheme(found, scheme)
    yield from _cold(found)
    yield from _ratios(found)
    yield from _same(found)


def _scheme(found: Recoveries, scheme: str) -> Iterator[Row]:
    pairs = found.recoveries(scheme)  # type: ignore[arg-type]
    recoveries = [recovery for _, recovery in pairs]
    note = f"median of {len(recoveries)} kills"
    if scheme == "warm restart":
        note += (
            f"; processes forked from one with torch imported, checkpoint every {CHECKPOINT_EVERY} steps"
            " on a local disk, which another host would not have"
        )
    yield figure(f"{scheme}: loss to first step", "s", median([r.seconds for r in recoveries]), note=note)
    yield from _phases(scheme, recoveries)
    regained = median([ran.regained(recovery) for ran, recovery in pairs])
    yield figure(f"{scheme}: loss to first step that is new", "s", regained)
    again = [float(r.steps_lost) for r in recoveries if r.steps_lost is not None]
    worst = max(again, default=None)
    yield figure(f"{scheme}: steps done again, most", "steps", worst, "0" if scheme == "templates" else "")


def _phases(scheme: str, recoveries: Sequence[Recovery]) -> Iterator[Row]:
    for phase in PHASES:
        shown = {"load": "copy", "first_step": "first step"}.get(phase, phase)
        value = median([recovery.phases[phase] for recovery in recoveries])
        yield figure(f"{scheme}, phase {shown}", "s", value)


def _cold(found: Recoveries) -> Iterator[Row]:
    yield figure(
        "cold restart: loss to first step", "s", median(c.seconds for c in found.cold),
        note=f"median of {len(found.cold)} kills; all processes end, interpreter and torch start anew (one"
        " import of torch serves all hosts of this computer)",
    )  # fmt: skip
    regained = median(c.regained for c in found.cold)
    yield figure("cold restart: loss to first step that is new", "s", regained)


def _ratios(found: Recoveries) -> Iterator[Row]:
    ours = median(recovery.seconds for _, recovery in found.recoveries("templates"))
    restarts = found.recoveries("warm restart")
    for name, theirs in (
        ("warm restart / templates, first step", median(r.seconds for _, r in restarts)),
        ("warm restart / templates, first new step", median(f.regained(r) for f, r in restarts)),
        ("cold restart / templates, first step", median(c.seconds for c in found.cold)),
        ("cold restart / templates, first new step", median(c.regained for c in found.cold)),
    ):
        ratio = theirs / ours if theirs and ours else None
        yield figure(name, "times", ratio)


def _same(found: Recoveries) -> Iterator[Row]:
    truth = found.undisturbed
    runs = [ran for several in found.ran.values() for ran in several]
    equal = sum(ran.losses == truth.losses and ran.hashes == truth.hashes for ran in runs)
    cold = sum(all(truth.losses[s] == loss for s, loss in one.losses.items()) for one in found.cold)
    kills = sum(len(found.recoveries(scheme, back)) for scheme, back in found.ran)
    yield figure(
        "runs bit-identical to an undisturbed one", "", equal / len(runs), "all", met=equal == len(runs),
        note=f"{len(runs)} runs with {kills} kills: loss of every step, and hash of every layer with its"
        " optimizer; fixed-point sums of gradients",
    )  # fmt: skip
    yield figure(
        "cold restarts with the same losses", "", cold / len(found.cold), "all", met=cold == len(found.cold)
    )


def rates_rows(quick: bool) -> Iterator[Row]:
    """Rows of the section: throughput, downtime included, for each rate of loss."""
    found, grid = measure_recoveries(quick), measure_grid(quick)
    yield figure(
        "without losses", "samples/s", SAMPLES / found.step_time,
        note=f"{conditions(found.step_time)}; a warm restart takes {found.restart():.2f} s to its first step",
    )  # fmt: skip
    for cell in grid.cells:
        yield from _cell(cell)
    several = [ran for cell in grid.cells for ran in cell.ran.values()]
    truth = grid.reference.losses
    equal = sum(
        len(ran.losses) == ran.steps and all(truth[s] == loss for s, loss in ran.losses.items())
        for ran in several
    )
    pairs = sum(len({tuple(f.hashes.items()) for f in cell.ran.values()}) == 1 for cell in grid.cells)
    yield figure(
        "runs bit-identical to an undisturbed one", "", equal / len(several), "all",
        met=equal == len(several) and pairs == len(grid.cells),
        note=f"loss of every step, against a run on two hosts; hashes equal between the schemes in {pairs}"
        f" of {len(grid.cells)} cells",
    )  # fmt: skip


def _cell(cell: Cell) -> Iterator[Row]:
    back = f"back after {COMES_AFTER:g} s" if cell.back else "not back"
    name = f"loss every {cell.every} steps, {back}"
    rate = {}
    for scheme, ran in cell.ran.items():
        rate[scheme] = (ran.steps - 1) * SAMPLES / ran.seconds
        down = sum(recovery.seconds or 0.0 for recovery in recoveries(ran.events))
        note = f"{ran.seconds:.1f} s, of which {down:.1f} s recoveries"
        yield figure(f"{name}: {scheme}", "samples/s", rate[scheme], note=note)
    ratio = rate["templates"] / rate["warm restart"]
    yield figure(f"{name}: templates / warm restart", "times", ratio)
