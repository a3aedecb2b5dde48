"""What a checkpoint of every step costs while nothing fails: time, memory, bytes sent, bytes written.

The job is real and the host's cores are all it has: two ranks of FSDP2 (and of DDP) with AdamW on two
emulated hosts, so whatever the checkpoint does in the background competes with the training itself. (On hosts
with accelerators the host's cores are mostly idle; `wasted` shows that case.) The ways to save take turns
within one job, some steps each, and so does the training alone: all meet what the host does meanwhile alike.
Beside them stand the floors, taken in the same job by all ranks at once: reading the state, copying it to
shared memory, sending it to the other host over a bare connection.

Source: GEMINI (Wang et al., SOSP 2023), section 7: checkpoints of every iteration without loss of throughput.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.jobs import Failed, finished
from benchmarks.harness.measure import conditions, quantile, scratch
from benchmarks.harness.rows import Row, figure, left_out
from benchmarks.training.checkpoint import PROGRAMS, SOURCE
from windtunnel.base import units

RANKS, COPIES = 2, 2
WIDTH, QUICK_WIDTH = 768, 128
REPLICA_WIDTH = 512  # 50 MB with AdamW's moments, on every rank
ARMS: Mapping[str, Any] = {
    "none": None, "concurrent": {}, "blocking": {"mode": "blocking"},
}  # fmt: skip
ALLOWED = 0.10
"""Of "concurrent": share of the time of a step without checkpoints."""
ROUNDS, STEPS, SETTLE = 4, 16, 4
PATIENCE = 300.0
FLOORS = {
    "read": "reading the state once (its checksum)", "copy": "copying the state to shared memory",
    "send": "sending as much over a bare loopback connection",
}  # fmt: skip
"""What no checkpoint of all that changed can take less than, on these cores."""


def cost_rows(quick: bool) -> Iterator[Row]:
    with scratch() as folder:
        yield from job_rows(folder / "sharded", quick, replicas=False)
        yield from job_rows(folder / "replicas", quick, replicas=True)


def job_rows(folder: Path, quick: bool, *, replicas: bool) -> Iterator[Row]:
    """The job with all ways to save: FSDP2, or ``replicas`` of the whole state (DDP), which are not sent."""
    kind = ", DDP" if replicas else ""
    load = conditions()
    try:
        found = ran(folder, quick, replicas=replicas)
    except Failed as error:
        yield left_out(f"a step with its checkpoint{kind} (failed)", str(error))
        return
    none = found["arms"].pop("none")
    plain = median(none["seconds"])
    yield figure(
        f"a step without checkpoints{kind}", "s", plain,
        note=f"median of {len(none['seconds'])}, p95 {units.seconds(quantile(none['seconds'], 0.95))};"
        f" {RANKS} ranks on {RANKS} hosts that share {os.cpu_count()} cores; {load}",
    )  # fmt: skip
    for arm, of in found["arms"].items():
        yield from time_rows(arm, of, none, kind)
    for name, what in FLOORS.items():
        seconds = found["floors"][name]
        yield figure(
            f"floor: {what}{kind}", "s", seconds,
            note=f"{seconds / plain:.1%} of a step without checkpoints; all ranks at once",
        )  # fmt: skip
    yield from memory_rows(found["arms"]["concurrent"]["used"], kind)


def ran(folder: Path, quick: bool, *, replicas: bool) -> dict[str, Any]:
    """What rank 0 found: see the program.

    Raises:
        Failed: it did not come through.
    """
    plan = {
        "width": QUICK_WIDTH if quick else REPLICA_WIDTH if replicas else WIDTH, "replicas": replicas,
        "arms": ARMS,
        "rounds": 1 if quick else ROUNDS, "steps": STEPS // 2 if quick else STEPS, "settle": SETTLE,
    }  # fmt: skip
    program, options = PROGRAMS / "cost_trainer.py", {"hosts": RANKS, "frozen_after": 5.0, "lease": 5.0}
    results, _ = finished(program, [json.dumps(plan)], folder, PATIENCE, **options)
    found: dict[str, Any] = results[0]
    return found


def time_rows(arm: str, of: dict[str, Any], none: dict[str, Any], kind: str) -> Iterator[Row]:
    """A step's time with a way to save, and how long the program waits for it."""
    times = of["seconds"]
    over = median(times) / median(none["seconds"]) - 1
    judged = arm == "concurrent"
    yield figure(
        f"a step with its checkpoint, {arm}{kind}", "s", median(times),
        f"at most {ALLOWED:.0%} over none" if judged else "", met=over <= ALLOWED,
        note=f"{over:+.1%} over none; p95 {units.seconds(quantile(times, 0.95))}",
    )  # fmt: skip
    yield figure(
        f"stall of a step, {arm}{kind}", "s", median(of["stalls"]), published=0.0 if judged else None,
        source=f"{SOURCE}: no loss of throughput, with accelerators",
    )  # fmt: skip


def memory_rows(used: dict[str, int], kind: str) -> Iterator[Row]:
    """What a host's memory holds, and what it sends for one checkpoint."""
    yield figure(
        f"memory that checkpoints take on a host{kind}", "bytes", used["held"],
        note=f"{used['held'] / used['own']:.2f} x its rank's state of {used['own']:,} B: 2 slots of each copy"
        " that lies here, in tmpfs",
    )  # fmt: skip
    yield figure(
        f"bytes that a host sends for one checkpoint{kind}", "bytes", used["sent"],
        note=f"{used['sent'] / used['own']:.2f} x its rank's state, for {COPIES - 1} copy in a peer; what all"
        " ranks hold alike is not sent",
    )  # fmt: skip
