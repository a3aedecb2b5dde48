"""What a checkpoint of every step costs while nothing fails: time, memory, bytes sent, bytes written.

The job is real and the host's cores are all it has: two ranks of FSDP2 (and of DDP) with AdamW on two
emulated hosts, so whatever the checkpoint does in the background competes with the training itself. (On hosts
with accelerators the host's cores are mostly idle; `wasted` shows that case.) The job runs without
checkpoints, then with every step's in concurrent mode and in blocking mode, and once more without.

The persist tier writes content-addressed pieces: what did not change since the last save is not written
again. How much that spares depends on how much of a state changes, so it is shown for a full training, where
AdamW changes all, and for a fine-tuning that changes a tenth.

Source: GEMINI (Wang et al., SOSP 2023), section 7: checkpoints of every iteration without loss of throughput.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from windtunnel.base import units
from windtunnel.bench.measure import conditions, quantile, scratch
from windtunnel.bench.rows import Row, left_out
from windtunnel.training.checkpoint.bench import harness
from windtunnel.training.checkpoint.bench.harness import SOURCE, Failed
from windtunnel.training.elastic.events import Event

SECTION = "cost"
row = partial(Row, SECTION)
RANKS, COPIES = 2, 2
WIDTH, QUICK_WIDTH = 768, 128
REPLICA_WIDTH = 512  # 50 MB with AdamW's moments, on every rank
STEPS, QUICK_STEPS = 40, 8
WARM = 3  # steps before any counts: memory is made, plans too
MODES = ("none", "concurrent", "blocking", "none")
QUICK_MODES = ("none", "concurrent", "blocking")
CHANGED = 0.1
SAVED_MIB, QUICK_SAVED_MIB = 256, 64
PARTS = 20


def cost_rows(quick: bool) -> Iterator[Row]:
    with scratch() as folder:
        yield from job_rows(folder / "sharded", quick, replicas=False)
        yield from job_rows(folder / "replicas", quick, replicas=True)
        yield from persist_rows(folder / "persisted", QUICK_SAVED_MIB if quick else SAVED_MIB)


def job_rows(folder: Path, quick: bool, *, replicas: bool) -> Iterator[Row]:
    """The job in every mode: FSDP2, or ``replicas`` of the whole state (DDP), which are not sent."""
    told = conditions()
    steps: dict[str, list[Event]] = {}
    used: dict[str, dict[str, int]] = {}
    kind = ", DDP" if replicas else ""
    for number, mode in enumerate(QUICK_MODES if quick else MODES):
        try:
            found, used[mode] = ran(folder / str(number), mode, quick, replicas=replicas)
            steps.setdefault(mode, []).extend(found)
        except Failed as error:
            yield left_out(SECTION, f"{mode}{kind} (failed)", str(error))
    if "none" in steps:
        yield from time_rows(steps, used, told, kind)
    yield from memory_rows(used, kind)


def ran(folder: Path, mode: str, quick: bool, *, replicas: bool) -> tuple[list[Event], dict[str, int]]:
    """The steps of a job that nothing disturbs, without the first, and what rank 0's host used.

    Raises:
        Failed: it did not come through.
    """
    harness.end_at(folder, WARM + (QUICK_STEPS if quick else STEPS))
    width = QUICK_WIDTH if quick else REPLICA_WIDTH if replicas else WIDTH
    arguments = ["--mode", mode, "--width", width, "--copies", COPIES, *["--replicas"] * replicas]
    with harness.running("fsdp_trainer", arguments, folder, hosts=RANKS, frozen_after=5.0) as launched:
        results = harness.ended(launched)
        events = launched.events()
    return [event for event in events if event["kind"] == "step"][WARM:], results[0]["used"]


def time_rows(
    steps: dict[str, list[Event]], used: dict[str, dict[str, int]], told: str, kind: str
) -> Iterator[Row]:
    """A step's time in each mode, and where the time of a save goes."""
    plain = median(event["seconds"] for event in steps["none"])
    yield row(
        f"a step without checkpoints{kind}",
        "s",
        measured=plain,
        note=f"median of {len(steps['none'])}, p95 "
        f"{units.seconds(quantile([event['seconds'] for event in steps['none']], 0.95))}; {RANKS} ranks on "
        f"{RANKS} hosts that share {os.cpu_count()} cores; {told}",
    )
    for mode in ("concurrent", "blocking"):
        if not steps.get(mode):
            continue
        times = [event["seconds"] for event in steps[mode]]
        mib = used[mode].get("own", 0) / 2**20
        yield row(
            f"a step with its checkpoint, {mode}{kind}",
            "s",
            measured=median(times),
            note=f"{median(times) / plain - 1:+.1%} over none; p95 {units.seconds(quantile(times, 0.95))}; "
            f"{mib:.1f} MiB a rank, {COPIES} copies",
        )
        yield row(
            f"stall of a step, {mode}{kind}",
            "s",
            measured=median(event["stall"] for event in steps[mode]),
            published=0.0 if mode == "concurrent" else None,
            source=f"{SOURCE}: no loss of throughput, with accelerators" if mode == "concurrent" else "",
            note=split(steps[mode], mode),
        )


def split(steps: Sequence[Event], mode: str) -> str:
    """Medians of the parts of a stall, in words."""
    parts = {name: median(event[name] for event in steps) for name in ("stall", "copy", "settle", "wait")}
    rest = max(0.0, parts["stall"] - parts["copy"] - parts["settle"] - parts["wait"])
    which = "of the save before" if mode == "concurrent" else "of this save"
    return (
        f"copy {units.seconds(parts['copy'])}, waiting for the checksum {which} "
        f"{units.seconds(parts['settle'])}, waiting for the commit {which} {units.seconds(parts['wait'])}, "
        f"the rest (walking the state, packing objects, telling the agent) {units.seconds(rest)}"
    )


def memory_rows(used: dict[str, dict[str, int]], kind: str) -> Iterator[Row]:
    """What a host's memory holds, and what it sends for one checkpoint."""
    found = used.get("concurrent") or used.get("blocking")
    if not found:
        return
    own = found["own"]
    yield row(
        f"memory that checkpoints take on a host{kind}",
        "bytes",
        measured=found["held"],
        note=f"{found['held'] / own:.2f} x its rank's state of {own:,} B: 2 slots of each copy "
        f"that lies here, in tmpfs",
    )
    yield row(
        f"bytes that a host sends for one checkpoint{kind}",
        "bytes",
        measured=found["sent"],
        note=f"{found['sent'] / own:.2f} x its rank's state, for {COPIES - 1} copy in a peer; what all ranks "
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
