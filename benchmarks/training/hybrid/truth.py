"""Live ranks beside virtual ones, against worlds in which all ranks are real.

*Time.* A world of four or eight real ranks does not fit two cores, and other work on the machine makes wall
times useless. So in the reference *all* ranks are live: each runs the whole job, over gloo, with true data,
and its CPU seconds are its clock. Both sides price collectives alike: what is held against each other is how
virtual ranks compute and wait in place of real ones. Both run at the same time, since CPU seconds, too, are
longer on a busy machine. The spread of the reference is half of what lies between the quartiles of its steps.
*Memory* is exact or missed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.harness.measure import scratch, side_by_side
from benchmarks.harness.rows import Row, figure, need
from benchmarks.training.emulate.jobs import BenchJob, example, real_peak
from windtunnel.cluster.load import load_cluster
from windtunnel.training.emulate.emulation import EmulationResult, simulate
from windtunnel.training.emulate.hybrid import run_live
from windtunnel.training.emulate.options import Options
from windtunnel.training.emulate.program import Script
from windtunnel.training.emulate.summary import HybridFacts

STEPS = 13


@dataclass(frozen=True)
class Layout:
    """A small job of the example: how it is parallel, and in which worlds."""

    name: str
    words: str
    worlds: tuple[int, ...]

    def emulated(self, world: int) -> EmulationResult:
        words = f"--size debug --ac none --dtype fp32 --seq 128 --steps {STEPS} {self.words}".split()
        return simulate(Script(example(), tuple(words)), load_cluster(f"cpu:1x{world}"), Options(live="0"))


LAYOUTS = (
    Layout("FSDP2", "--batch 4 --parallel fsdp", (2, 4, 8)),
    Layout("DDP", "--batch 4 --parallel ddp", (2, 4, 8)),
    Layout("TP2", "--batch 4 --parallel fsdp --tp 2", (2, 4)),
    Layout("PP2", "--batch 8 --parallel fsdp --pp 2", (2, 4)),
)


def live(result: EmulationResult, ranks: Sequence[int]) -> HybridFacts:
    with scratch() as folder:
        return run_live(result, ranks, folder / "live")


def together(result: EmulationResult, which: Sequence[Sequence[int]]) -> list[HybridFacts]:
    """Runs with these live ranks at the same time, so that what else the machine does slows all alike."""
    return side_by_side([partial(live, result, ranks) for ranks in which], len(which))


def step_seconds(facts: HybridFacts) -> tuple[float, float]:
    """Of the steps of rank 0 that the others had part in: the median, and the spread over it."""
    first, median, third = statistics.quantiles(
        [step.seconds for step in facts.ranks[0].steps if step.hybrid]
    )
    return median, (third - first) / 2 / median


def time_rows(quick: bool) -> Iterator[Row]:
    """An iteration of one or two live ranks of a world against the world with all ranks live."""
    beyond, overheads = [], []
    for world in (2,) if quick else (2, 4, 8):
        for layout in (layout for layout in LAYOUTS if world in layout.worlds):
            result = layout.emulated(world)
            everybody, first, *second = together(
                result, [range(world), [0], *([[0, 1]] if world == 4 else [])]
            )
            real, spread = step_seconds(everybody)
            hybrids = [step_seconds(facts)[0] for facts in (first, *second)]
            steps = [step for step in first.ranks[0].steps if step.hybrid]
            spent = statistics.median(step.backend_s for step in steps)
            own = statistics.median(step.own_s for step in steps)
            overheads.append((f"{layout.name}, world {world}", spent, spent / (spent + own)))
            for count, seconds in enumerate(hybrids, 1):
                error = abs(seconds - real) / real
                beyond.append(max(0.0, error - spread))
                yield figure(
                    f"iteration, {layout.name}, {count} live of {world}", "s", real, emulated=seconds,
                    note="median step of rank 0, all ranks live;"
                    f" the real world's own spread {spread:.1%}; emulated alone"
                    f" {result.timing.iteration_time_s * 1e3:.1f} ms",
                )  # fmt: skip
    mean = statistics.mean(beyond)
    yield figure("error beyond the real world's spread, mean", "", goal="<= 2%", emulated=mean)
    for name, spent, share in overheads:
        note = f"{spent * 1e3:.2f} ms a step, supplying the data included"
        yield figure(f"backend's CPU time of a live rank's step, {name}", "", share, "<= 1%", note=note)


def memory_rows(quick: bool) -> Iterator[Row]:
    """Peak bytes of a live rank's tensors against those of the ranks of a real world."""
    for parallel in ("ddp", "fsdp"):
        for world in (2,) if quick else (2, 4):
            job = BenchJob(parallel, world, seq=64, batch=2)
            script = Script(example(), tuple(job.arguments(5)))
            facts = live(simulate(script, load_cluster(f"cpu:1x{world}"), Options(live="0")), [0])
            (measured, note), peak = real_peak(job), facts.ranks[0].peak_tensor_bytes
            name = f"peak tensor bytes, {job.name}, 1 live"
            yield figure(name, "bytes", measured, "equal", emulated=peak, note=note)


def scale_rows(quick: bool) -> Iterator[Row]:
    """One live rank beside 8,191 virtual ones."""
    need("8,192 ranks are not in a quick run" * quick)
    words = "--size debug --parallel ddp --seq 128 --batch 4 --steps 10"
    began = time.monotonic(), time.process_time()
    result = simulate(Script(example(), tuple(words.split())), load_cluster("cpu:1024x8"), Options(live="17"))
    captured = time.monotonic()
    facts = live(result, [17])
    note = f"emulation {captured - began[0]:.0f} s, {facts.simulated} virtual ranks simulated for all"
    yield figure("rank 17 of 8,192, DDP: command to report", "s", time.monotonic() - began[0], note=note)
    yield figure("... CPU time of this process", "s", time.process_time() - began[1])
    step = facts.ranks[0]
    yield figure("... iteration", "s", emulated=step.iteration_time_s)
