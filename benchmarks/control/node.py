"""Faults in the twin with safeguards on and off; real loads of this host beside the kernel's own cpu.idle."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from itertools import count, product

from benchmarks.harness.measure import in_turn, ratios, scratch
from benchmarks.harness.rows import Row, figure, need
from windtunnel.control.node import Guards, emulate, measured, paged
from windtunnel.control.node.live.demo import ARMS
from windtunnel.control.node.twin import FAULTS


def faults_rows(quick: bool) -> Iterator[Row]:
    """Harvest in the twin: the share of steps in which the primary is starved. Overclock: the energy that
    boosts waste, of all that nominal takes. Each the mean over seeds."""
    agents = {"harvest": (60.0, "starved", "<= 1.6 %", "lends {:.2f} of 8 cores"),
              "overclock": (360.0, "wasted energy", "<= 0.6 %", "{:+.1%} work")}  # fmt: skip
    for agent, fault in product(agents, FAULTS):
        least, harm_name, bound, words = agents[agent]
        seconds, seeds = (least, range(1)) if quick else (5 * least, range(3))
        for name, guards in (("off", Guards(False, False, False, False)), ("on", Guards())):
            runs = [emulate(agent, fault, guards, seconds=seconds, seed=seed) for seed in seeds]
            harm, gain = (sum(getattr(run, each) for run in runs) / len(runs) for each in ("harm", "gain"))
            title, goal = f"{agent}, {fault}, guards {name}: {harm_name}", bound if name == "on" else ""
            # a quick run is over before some faults are
            yield figure(title, "", goal=goal, emulated=harm, judged=not quick, note=words.format(gain))


def harvest_rows(quick: bool) -> Iterator[Row]:
    """The p99 of the primary with an agent, cpu.idle and an equal batch, against that without a batch in the
    same round. Seven rounds of four arms end within four minutes."""
    need("control groups are made by root, and this process is not" * bool(os.geteuid()))
    with scratch() as folder:
        logs = (folder / str(number) for number in count())
        limit = max(0.1, 2 * measured("alone", 4.0, next(logs)).waited)
        arms = {arm: partial(lambda arm: measured(arm, 4.0, next(logs), limit), arm) for arm in ARMS}
        rounds = in_turn(arms, 2 if quick else 7)
    for arm, runs in rounds.items():
        p99, goal = [run.p99 for run in runs], "<= 1.1 times" * (arm == "harvest")
        yield figure(f"{arm}: p99", "s", p99)
        if arm != "alone":
            times = ratios(p99, (run.p99 for run in rounds["alone"]))
            yield figure(f"{arm}: p99 against alone, of a round", "times", times, goal)
            yield figure(f"{arm}: lent", "cores", (run.lent for run in runs))


def memory_rows(quick: bool) -> Iterator[Row]:
    """What lies in the slow tier, and how many accesses go there: in the twin, and of a load of this host."""
    run = emulate("memory", seconds=120.0 if quick else 600.0)
    yield figure("accesses that go to the slow tier", "", goal="<= 5 %", emulated=run.harm)
    yield figure("memory in the slow tier", "", emulated=run.gain)
    need("memory is moved by root, and this process is not" * bool(os.geteuid()))
    with scratch() as folder:
        without, load = (paged(agent, 10.0, folder / "log") for agent in (False, True))
    note = f"{load['tier']}; {load['accesses'] / without['accesses']:.3f} times the accesses of no agent"
    yield figure("accesses of a load that go there", "", load["remote"], "<= 5 %", note=note)
    yield figure("memory of the load there", "", load["slow"])
