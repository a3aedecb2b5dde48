"""What a checkpoint of every step costs while nothing fails: time, memory, bytes sent, bytes written.

The job is real and the host's cores are all it has: two ranks of FSDP2 (and of DDP) with AdamW on two
emulated hosts, so whatever the checkpoint does in the background competes with the training itself. (On hosts
with accelerators the host's cores are mostly idle; `wasted` shows that case.) The ways to save take turns
within one job, some steps each, and so does the training alone: all meet what the host does meanwhile alike.
Beside them stand the floors, taken in the same job by all ranks at once: reading the state, copying it to
shared memory, sending it to the other host over a bare connection; and DCP's ``async_save``, whose result is
in shared memory, too, but neither copied to another host nor committed.

The persist tier writes content-addressed pieces: what did not change since the last save is not written
again. How much that spares depends on how much of a state changes, so it is shown for a full training, where
AdamW changes all, and for a fine-tuning that changes a tenth.

Source: GEMINI (Wang et al., SOSP 2023), section 7: checkpoints of every iteration without loss of throughput.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.harness.measure import conditions, quantile, scratch
from benchmarks.harness.rows import Row, left_out
from benchmarks.training.checkpoint import harness
from benchmarks.training.checkpoint.harness import SOURCE, Failed
from windtunnel.base import units

SECTION = "cost"
row = partial(Row, SECTION)
RANKS, COPIES = 2, 2
WIDTH, QUICK_WIDTH = 768, 128
REPLICA_WIDTH = 512  # 50 MB with AdamW's moments, on every rank
ARMS: Mapping[str, Any] = {
    "none": None,
    "concurrent": {},
    "beside the next step": {"overlap": True},
    "blocking": {"mode": "blocking"},
    "idle": {"mode": "idle"},
    "within 3 %": {"budget": 0.03},
    "DCP async_save": "dcp",
}
LEARNS = "within 3 %"
QUICK_ARMS = ("none", "concurrent", "blocking")
ALLOWED = {"concurrent": 0.10, "idle": 0.03, LEARNS: 0.03}
"""Share of the time of a step without checkpoints."""
ROUNDS, STEPS, SETTLE = 4, 16, 4
PATIENCE = 300.0
CHANGED = 0.1
SAVED_MIB, QUICK_SAVED_MIB = 256, 64
PARTS = 20


def cost_rows(quick: bool) -> Iterator[Row]:
    with scratch() as folder:
        yield from job_rows(folder / "sharded", quick, replicas=False)
        yield from job_rows(folder / "replicas", quick, replicas=True)
        yield from persist_rows(folder / "persisted", QUICK_SAVED_MIB if quick else SAVED_MIB)


def job_rows(folder: Path, quick: bool, *, replicas: bool) -> Iterator[Row]:
    """The job with all ways to save: FSDP2, or ``replicas`` of the whole state (DDP), which are not sent."""
    told = conditions()
    kind = ", DDP" if replicas else ""
    try:
        found = ran(folder, quick, replicas=replicas)
    except Failed as error:
        yield left_out(SECTION, f"a step with its checkpoint{kind} (failed)", str(error))
        return
    plain = found["arms"]["none"]["seconds"]
    yield row(
        f"a step without checkpoints{kind}",
        "s",
        measured=median(plain),
        note=f"median of {len(plain)}, p95 {units.seconds(quantile(plain, 0.95))}; {RANKS} ranks on {RANKS} "
        f"hosts that share {os.cpu_count()} cores; {told}",
    )
    for arm, of in found["arms"].items():
        if arm != "none":
            yield from time_rows(arm, of, found["arms"]["none"], kind)
    yield from floor_rows(found["floors"], median(plain), kind)
    yield from memory_rows(found["arms"]["concurrent"]["used"], kind)


def ran(folder: Path, quick: bool, *, replicas: bool) -> dict[str, Any]:
    """What rank 0 found: see the program.

    Raises:
        Failed: it did not come through.
    """
    plan = {
        "width": QUICK_WIDTH if quick else REPLICA_WIDTH if replicas else WIDTH,
        "replicas": replicas,
        "arms": {arm: ARMS[arm] for arm in (QUICK_ARMS if quick else ARMS)},
        "rounds": 1 if quick else ROUNDS,
        "steps": STEPS // 2 if quick else STEPS,
        "settle": SETTLE,
        "learns": [] if quick else [LEARNS],
    }
    with harness.running(
        "cost_trainer", [json.dumps(plan)], folder, hosts=RANKS, frozen_after=5.0
    ) as launched:
        found: dict[str, Any] = harness.ended(launched, PATIENCE)[0]
    return found


def time_rows(arm: str, of: dict[str, Any], none: dict[str, Any], kind: str) -> Iterator[Row]:
    """A step's time with a way to save, what processors do for it, and where the time of a save goes."""
    plain, times = median(none["seconds"]), of["seconds"]
    trainer, agent = (
        median(cpu[at] for cpu in of["cpu"]) - median(cpu[at] for cpu in none["cpu"]) for at in (0, 1)
    )
    allowed = ALLOWED.get(arm)
    # Where only some steps have a checkpoint the median shows nothing of it.
    over = mean(times) / mean(none["seconds"]) - 1 if arm == LEARNS else median(times) / plain - 1
    often = f" (means), one every {of['every']} steps" if arm == LEARNS else ""
    yield row(
        f"a step with its checkpoint, {arm}{kind}",
        "s",
        measured=mean(times) if arm == LEARNS else median(times),
        target=f"at most {allowed:.0%} over none" if allowed else "",
        met=over <= allowed if allowed else None,
        note=f"{over:+.1%} over none{often}; p95 {units.seconds(quantile(times, 0.95))}; processor time more "
        f"than without: {units.seconds(max(0.0, trainer))} of the trainer, "
        f"{units.seconds(max(0.0, agent))} of its host's agent",
    )
    if arm in ("concurrent", "blocking"):
        yield row(
            f"stall of a step, {arm}{kind}",
            "s",
            measured=median(spent["stall"] for spent in of["spent"]),
            published=0.0 if arm == "concurrent" else None,
            source=f"{SOURCE}: no loss of throughput, with accelerators" if arm == "concurrent" else "",
            note=split(of["spent"], arm),
        )


def split(spent: list[dict[str, float]], arm: str) -> str:
    """Medians of the parts of a stall, in words."""
    parts = {name: median(one[name] for one in spent) for name in ("stall", "copy", "settle", "wait")}
    rest = max(0.0, parts["stall"] - parts["copy"] - parts["settle"] - parts["wait"])
    which = "of the save before" if arm == "concurrent" else "of this save"
    return (
        f"copy {units.seconds(parts['copy'])}, waiting for the copy {which} "
        f"{units.seconds(parts['settle'])}, waiting for the commit {which} {units.seconds(parts['wait'])}, "
        "the rest (walking and reading the state, packing objects, telling the agent) "
        f"{units.seconds(rest)}"
    )


def floor_rows(floors: dict[str, float], plain: float, kind: str) -> Iterator[Row]:
    """What no checkpoint of all that changed can take less than, on these cores."""
    words = {
        "read": "reading the state once (its checksum)",
        "copy": "copying the state to shared memory",
        "send": "sending as much over a bare loopback connection",
    }
    for name, what in words.items():
        yield row(
            f"floor: {what}{kind}",
            "s",
            measured=floors[name],
            note=f"{floors[name] / plain:.1%} of a step without checkpoints; all ranks at once",
        )


def memory_rows(used: dict[str, int], kind: str) -> Iterator[Row]:
    """What a host's memory holds, and what it sends for one checkpoint."""
    own = used["own"]
    yield row(
        f"memory that checkpoints take on a host{kind}",
        "bytes",
        measured=used["held"],
        note=f"{used['held'] / own:.2f} x its rank's state of {own:,} B: 2 slots of each copy that lies "
        "here, in tmpfs",
    )
    yield row(
        f"bytes that a host sends for one checkpoint{kind}",
        "bytes",
        measured=used["sent"],
        note=f"{used['sent'] / own:.2f} x its rank's state, for {COPIES - 1} copy in a peer; what all ranks "
        f"hold alike is not sent",
    )


def persist_rows(folder: Path, mib: int) -> Iterator[Row]:
    """Bytes that a second save to storage adds, of a state that changed wholly, or by a tenth."""
    for words, share in (("full training", 1.0), ("a tenth of it trained", CHANGED)):
        first, second = persisted(folder / words.replace(" ", "-"), mib, share)
        yield row(
            f"written by the next save to storage, {words}",
            "",
            measured=second / first,
            note=f"{second:,} B after {first:,} B of the first save; one rank, {mib} MiB with AdamW's "
            f"moments; pieces that did not change are not written again",
        )


def persisted(folder: Path, mib: int, share: float) -> tuple[int, int]:
    """Bytes in storage that a first save made, and that a second one added after a step which changes
    ``share`` of the parts."""
    import torch
    from torch import nn

    from windtunnel.training.checkpoint import PeerCheckpointer
    from windtunnel.training.elastic import Job

    made = torch.Generator().manual_seed(3)
    count = mib * 2**20 // (12 * PARTS)
    model = nn.ParameterList([nn.Parameter(torch.randn(count, generator=made)) for _ in range(PARTS)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kept: dict[str, Any] = {}
    checkpointer = PeerCheckpointer(
        Job(0, 1, 0, timeout=60.0, kept=kept), persist=str(folder), persist_every=1
    )
    sizes = []
    for step in range(2):
        for parameter in list(model)[: PARTS if step == 0 else round(PARTS * share)]:
            parameter.grad = torch.randn(count, generator=made)
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.step(step, {"model": model, "optimizer": optimizer})
        sizes.append(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
    checkpointer.close()
    return sizes[0], sizes[1] - sizes[0]
