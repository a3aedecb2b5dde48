"""What a checkpoint of every step costs while nothing fails: time, memory, bytes sent, bytes written.

*cost*: the host's cores are all that the job has: two ranks of FSDP2 (and of DDP) with AdamW on two emulated
hosts, so whatever the checkpoint does in the background competes with the training itself. (On hosts with
accelerators the host's cores are mostly idle; `wasted` shows that case.) The ways to save take turns within
one job, some steps each, and so does the training alone: all meet what the host does meanwhile alike.

*idle*: do checkpoints that go to a peer over the training's own network make its steps longer? The two hosts
have a network of their own with a token bucket on each link. A step is some all-reduces, with a pause after
each for the time that a device would compute (*slept*, so the host's few cores are free for what is
measured). Images are given as the time that the link needs for them over the network's idle time in a step.
All else is the product's own path: `PeerCheckpointer`, agents, memory services, the control plane.

Source: GEMINI (Wang et al., SOSP 2023), sections 5 and 7: checkpoints of every iteration without loss of
throughput.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.jobs import finished
from benchmarks.harness.measure import quantile, scratch
from benchmarks.harness.rows import Row, figure, need
from benchmarks.training.checkpoint import PROGRAMS, SOURCE
from windtunnel.base import units
from windtunnel.linux import network

HOSTS, COPIES, TIMEOUT = 2, 2, 400.0
WIDTH, QUICK_WIDTH = 768, 128
REPLICA_WIDTH = 512  # 50 MB with AdamW's moments, on every rank
ARMS: Mapping[str, Any] = {"none": None, "concurrent": {}, "blocking": {"mode": "blocking"}}
ALLOWED = 0.10
"""Of "concurrent": share of the time of a step without checkpoints."""
ROUNDS, STEPS, SETTLE = 4, 16, 4
LAYERS, MESSAGE, COMPUTE = 4, 3_000_000, 0.08  # all-reduces a step, bytes, seconds of pause after each
RATE = 50e6  # bytes/s: 400 Mbit/s
IDLE = LAYERS * COMPUTE  # seconds of a step without traffic
IDLE_ALLOWED = 3.0  # % of the median step
SETTLED = {"none": 2, "blocking": 2, "concurrent": 3, "idle": 8}  # steps that do not count
PHASES = (
    (("none", 0.0, 30), ("idle", 0.25, 24), ("idle", 0.5, 60), ("none", 0.0, 30), ("idle", 0.6, 24)),
    (("none", 0.0, 16), ("concurrent", 0.5, 60), ("none", 0.0, 16)),
    (("none", 0.0, 8), ("blocking", 0.5, 10), ("none", 0.0, 8)),
)
QUICK_PHASES = (
    (("none", 0.0, 10), ("idle", 0.5, 24), ("none", 0.0, 10)),
    (("none", 0.0, 6), ("concurrent", 0.5, 10), ("blocking", 0.5, 6)),
)
"""Of each job the phases: how it saves, image over idle time, steps that count. Images grow from phase to
phase: a smaller one would go to the slots of a larger one of before, which hold steps that nobody went back
to."""


def cost_rows(quick: bool) -> Iterator[Row]:
    with scratch() as folder:
        yield from job_rows(folder / "sharded", quick, replicas=False)
        yield from job_rows(folder / "replicas", quick, replicas=True)


def job_rows(folder: Path, quick: bool, *, replicas: bool) -> Iterator[Row]:
    """The job with all ways to save: FSDP2, or ``replicas`` of the whole state (DDP), which are not sent."""
    kind = ", DDP" if replicas else ""
    width = QUICK_WIDTH if quick else REPLICA_WIDTH if replicas else WIDTH
    counts = {"steps": STEPS // 2 if quick else STEPS, "settle": SETTLE}
    turns = [{"options": options, **counts} for options in ARMS.values()] * (1 if quick else ROUNDS)
    plan = {"width": width, "replicas": replicas, "turns": turns}
    results = ran(folder, plan, frozen_after=5.0, lease=5.0)[0]
    arms = {arm: results["turns"][at :: len(ARMS)] for at, arm in enumerate(ARMS)}
    seconds = {arm: [step for turn in each for step in turn["seconds"]] for arm, each in arms.items()}
    plain = seconds.pop("none")
    note = f"p95 {units.seconds(quantile(plain, 0.95))}"
    yield figure(f"a step without checkpoints{kind}", "s", plain, note=note)
    for arm, times in seconds.items():
        stalls = [stall for turn in arms[arm] for stall in turn["stalls"]]
        yield from time_rows(arm, times, stalls, plain, kind)
    used = arms["concurrent"][-1]
    note = f"{used['slots'] / used['own']:.2f} x its rank's state: 2 slots of each copy that lies here"
    yield figure(f"memory that checkpoints take on a host{kind}", "bytes", used["slots"], note=note)
    sent = max(used["sent"], default=0)
    note = f"{sent / used['own']:.2f} x its rank's state; what all ranks hold alike is not sent"
    yield figure(f"bytes that a host sends for one checkpoint{kind}", "bytes", sent, note=note)


def ran(folder: Path, plan: dict[str, Any], **options: Any) -> dict[int, dict[str, Any]]:
    """What each rank found: see the program.

    Raises:
        jobs.Failed: it did not come through.
    """
    program, words = PROGRAMS / "turns_trainer.py", [json.dumps(plan)]
    results: dict[int, dict[str, Any]] = finished(program, words, folder, TIMEOUT, hosts=HOSTS, **options)[0]
    return results


def time_rows(
    arm: str, seconds: list[float], stalls: list[float], plain: list[float], kind: str
) -> Iterator[Row]:
    """A step's time with a way to save, and how long the program waits for it."""
    over, judged = median(seconds) / median(plain) - 1, arm == "concurrent"
    yield figure(
        f"a step with its checkpoint, {arm}{kind}", "s", seconds,
        f"at most {ALLOWED:.0%} over none" if judged else "", passed=over <= ALLOWED,
        note=f"{over:+.1%} over none",
    )  # fmt: skip
    source = f"{SOURCE}: no loss of throughput, with accelerators"
    published = 0.0 if judged else None
    yield figure(f"stall of a step, {arm}{kind}", "s", stalls, published=published, source=source)


@dataclass(frozen=True)
class Phase:
    """``seconds`` of the steps that count; ``nbytes`` of a rank's state; ``inside``: the share of the bytes
    that went within windows."""

    mode: str
    ratio: float
    nbytes: int
    seconds: list[float]
    every: int = 1
    inside: float | None = None


def idle_rows(quick: bool) -> Iterator[Row]:
    need(network.missing())
    with scratch() as folder:
        for number, phases in enumerate(QUICK_PHASES if quick else PHASES):
            done = list(measure(folder / str(number), phases))
            alone = [step for phase in done if phase.mode == "none" for step in phase.seconds]
            if number == 0:
                note = (
                    f"2 hosts in network namespaces, {RATE * 8 / 1e6:.0f} Mbit/s, {LAYERS} all-reduces of"
                    f" {MESSAGE / 1e6:g} MB a step over gloo, {COMPUTE * 1e3:.0f} ms slept after each"
                )
                yield figure("no checkpoints: median step", "s", alone, note=note)
            for phase in done:
                if phase.mode != "none":
                    yield from rows(phase, alone)


def measure(folder: Path, phases: tuple[tuple[str, float, int], ...]) -> Iterator[Phase]:
    """What one job gives. All ranks wait for the slowest in every all-reduce."""
    turns: list[dict[str, Any]] = []
    for number, (mode, ratio, steps) in enumerate(phases):
        # a phase has slots of its own: by their size
        nbytes = max(4096, int(ratio * IDLE * RATE) // 4096 * 4096) + 4096 * number
        options, settle = None if mode == "none" else {"mode": mode}, SETTLED[mode]
        turns.append({"options": options, "nbytes": nbytes, "steps": settle + steps, "settle": settle})
    plan = {"layers": LAYERS, "message": MESSAGE, "compute": COMPUTE, "turns": turns}
    # a host that is slow for a moment is no failure here
    results = ran(folder, plan, network="netns", rate=RATE, lease=10.0, frozen_after=10.0)
    for number, (mode, ratio, _) in enumerate(phases):
        each = [rank["turns"][number] for rank in results.values()]
        seconds = [max(each_rank) for each_rank in zip(*(turn["seconds"] for turn in each), strict=True)]
        sent, inside = (sum(sum(turn.get(field, ())) for turn in each) for field in ("sent", "inside"))
        share = inside / sent if mode == "idle" and sent else None
        yield Phase(mode, ratio, turns[number]["nbytes"], seconds, each[0].get("every", 1), share)


def rows(phase: Phase, alone: list[float]) -> Iterator[Row]:
    """One phase's figures."""
    name = f"image {phase.ratio:g} of idle time: {'idle spans' if phase.mode == 'idle' else phase.mode}"
    goal = f"at most {IDLE_ALLOWED:g} %" if phase.mode == "idle" else ""
    middle = 100 * (median(phase.seconds) / median(alone) - 1)
    note = f"{len(phase.seconds)} steps; {phase.nbytes / 1e6:.1f} MB a rank each {phase.every} steps"
    yield figure(f"{name}, median step over none", "%", middle, goal, note=note)
    high = 100 * (quantile(phase.seconds, 0.95) / quantile(alone, 0.95) - 1)
    yield figure(f"{name}, p95 step over p95 of none", "%", high)
    if phase.inside is not None:
        yield figure(f"{name}, bytes sent within predicted spans", "%", 100 * phase.inside)
