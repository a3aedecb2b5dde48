"""Faults in the twin with safeguards on and off; real loads of this host beside the kernel's own cpu.idle."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

from benchmarks.figures import figure
from benchmarks.harness.measure import conditions, in_turn, median, scratch
from benchmarks.harness.rows import Row, left_out
from windtunnel.control.node import Guards, emulate, measured

FAULTS = ("none", "bad data", "broken model", "late model", "frozen actuator")
OFF = Guards(False, False, False, False)


def fault_rows(quick: bool) -> Iterator[Row]:
    """Harvest in the twin: the share of steps in which the primary is starved, mean over seeds."""
    seconds, seeds = (60.0, range(1)) if quick else (300.0, range(3))
    for fault in FAULTS:
        for name, guards in (("off", OFF), ("on", Guards())):
            runs = [emulate("harvest", fault, guards, seconds=seconds, seed=seed) for seed in seeds]
            harm, gain = (sum(getattr(run, each) for run in runs) / len(runs) for each in ("harm", "gain"))
            goal = "<= 1.6 %" if name == "on" and not quick else ""
            note = f"lends {gain:.2f} of 8 cores; {len(runs)} seeds of {seconds:g} s"
            yield figure(
                "faults", f"{fault}, guards {name}: starved", "", goal=goal, emulated=harm, note=note
            )


def harvest_rows(quick: bool) -> Iterator[Row]:
    """The primary's p99 with an agent, with cpu.idle and with an equal batch, against that without a batch."""
    if os.geteuid():
        yield left_out("harvest", "primary's p99", "control groups are made by root, and this process is not")
        return
    load = conditions()
    with scratch() as folder:
        logs = iter(folder / str(number) for number in range(99))
        waits = measured("alone", 4.0, next(logs)).waited
        arms = {
            arm: partial(lambda arm: measured(arm, 5.0, next(logs), limit=max(0.1, 2 * waits)), arm)
            for arm in ("alone", "harvest", "cpu.idle", "free")
        }
        rounds = in_turn(arms, 2 if quick else 7)
    alone = median(each.p99 for each in rounds["alone"]) or 0.0
    for arm, found in rounds.items():
        p99 = median(each.p99 for each in found) or 0.0
        note = f"rounds of {min(each.p99 for each in found):.2g} to {max(each.p99 for each in found):.2g} s; {load}"
        yield figure("harvest", f"{arm}: p99", "s", p99, note=note)
        if arm != "alone":
            goal = "<= 1.1 times" if arm == "harvest" else ""
            yield figure("harvest", f"{arm}: p99 against alone", "times", p99 / alone, goal)
            yield figure("harvest", f"{arm}: lent", "cores", median(each.lent for each in found))


def memory_rows(quick: bool) -> Iterator[Row]:
    """Memory in the twin: what lies in the slow tier, and how many accesses go there."""
    run = emulate("memory", seconds=120.0 if quick else 600.0)
    yield figure("memory", "accesses that go to the slow tier", "", goal="<= 5 %", emulated=run.harm)
    yield figure(
        "memory", "memory in the slow tier", "", emulated=run.gain, note=f"{run.counts['scans']} scans"
    )
