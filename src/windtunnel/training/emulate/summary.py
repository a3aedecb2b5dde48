"""The summary of an emulation: plain data with a stable schema, documented in docs/summary.md."""

from __future__ import annotations

import platform
import resource
from collections import defaultdict
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import numpy as np

from windtunnel.cluster.draw import topology_text
from windtunnel.training.emulate.graph import Category, EventKind
from windtunnel.training.emulate.run import Outcome
from windtunnel.training.emulate.twin.collectives import CollectiveUse
from windtunnel.training.emulate.twin.cost.collectives import collective_cost, full_bytes, sharing_of
from windtunnel.training.emulate.twin.cost.operators import cost_of
from windtunnel.training.emulate.workload import utilisation

SCHEMA = "windtunnel.emulate/1"
Json = dict[str, Any]

APPROXIMATE = ("torch.compile", "flex_attention", "stands for", "stand in", "stand-in", "first rank")


def summarise(outcome: Outcome, run_id: str) -> Json:
    """All that is told of one emulation; see docs/summary.md for every field, its unit and its provenance."""
    cluster, timing, work = outcome.cluster, outcome.timing, outcome.work
    world, seconds = cluster.world_size, timing.iteration_time_s
    device = cluster.host.device
    approximations = [w for w in outcome.warnings if any(mark in w for mark in APPROXIMATE)]
    mfu = utilisation(work.model_flops, seconds, world, device, work.dtype)
    hfu = utilisation(work.hardware_flops, seconds, world, device, work.dtype)
    return {
        "schema": SCHEMA,
        "run_id": run_id,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("windtunnel", "torch")}
        | {"python": platform.python_version()},
        "command": {
            "script": str(outcome.script.path),
            "args": list(outcome.script.arguments),
            "options": _options(outcome),
        },
        "cluster": {
            "name": cluster.name,
            "hosts": cluster.hosts,
            "devices_per_host": cluster.devices_per_host,
            "device": device.name,
            "topology": topology_text(cluster),
            "nic": cluster.host.nic.name,
            "intra": cluster.host.intra.name,
        },
        "world_size": world,
        "captured_ranks": outcome.classes.captured,
        "steps_captured": len(outcome.classes.classes[0].slice.steps),
        "iteration_time_s": seconds,
        "first_iteration_time_s": outcome.first_iteration_s,
        "tokens_per_iteration": work.tokens,
        "tokens_per_second_per_device": work.tokens / seconds / world if seconds > 0 else 0.0,
        "model_flops_per_iteration": work.model_flops,
        "hardware_flops_per_iteration": work.hardware_flops,
        "flops_dtype": work.dtype,
        "mfu": mfu,
        "hfu": hfu,
        "cost_per_iteration": _price(outcome),
        "critical_rank": timing.critical_rank,
        "critical_path": _split(timing.critical_path),
        "waits": [
            {"what": w.what, "seconds": w.seconds, "share": w.share, "remedy": w.remedy} for w in timing.waits
        ],
        "ranks": [_rank_class(outcome, row) for row in range(len(outcome.classes.classes))],
        "collectives": [_collective(outcome, use) for use in timing.collectives],
        "operators": operator_table(outcome),
        "provenance": {
            "iteration_time_s": "emulated",
            "first_iteration_time_s": "emulated",
            "tokens_per_second_per_device": "emulated",
            "mfu": "emulated",
            "hfu": "emulated",
            "critical_path": "emulated",
            "ranks": "emulated",
            "collectives": "emulated",
            "tokens_per_iteration": "declared" if outcome.options.tokens is not None else "emulated",
            "cluster": "published",
            "wall_time_s": "measured",
            "peak_rss_bytes": "measured",
        },
        "approximations": approximations,
        "warnings": [w for w in outcome.warnings if w not in approximations],
        "replay": {
            "simulated_ranks": timing.simulated,
            "events": timing.events,
            "seed": outcome.options.seed,
        },
        "capture_time_s": outcome.capture_time_s,
        "wall_time_s": outcome.wall_time_s,
        "peak_rss_bytes": peak_rss_bytes(),
    }


def peak_rss_bytes() -> int:
    """Peak resident memory of this process plus that of its largest child, bytes."""
    return 1024 * sum(
        resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )


def _options(outcome: Outcome) -> Json:
    options = outcome.options
    return {
        "ranks": options.ranks,
        "slow": list(options.slow),
        "jitter": options.jitter,
        "seed": options.seed,
        "allocator": options.allocator,
        "tokens": options.tokens,
        "reserve_bytes": options.reserve_bytes,
    }


def _price(outcome: Outcome) -> float | None:
    hourly = outcome.cluster.price_per_device_hour
    return (
        None
        if hourly is None
        else hourly * outcome.cluster.world_size * outcome.timing.iteration_time_s / 3600
    )


def _split(parts: dict[str, float]) -> dict[str, float]:
    """Every kind that there always is, then exposed communication by group kind; in seconds."""
    always = {
        kind: parts.get(kind, 0.0) for kind in ("compute", "pipeline_bubble", "imbalance", "launch", "idle")
    }
    return (
        {"compute": always.pop("compute")}
        | {k: v for k, v in parts.items() if k.startswith("communication:")}
        | always
    )


def _rank_class(outcome: Outcome, row: int) -> Json:
    cls, memory, timing = outcome.classes.classes[row], outcome.memory[row], outcome.timing
    total = outcome.cluster.host.device.memory_bytes
    whole, steady = memory.whole, memory.steady
    oom = memory.oom
    return {
        "name": cls.name,
        "members": cls.members.tolist(),
        "count": len(cls.members),
        "captured": list(cls.captured),
        "peak_allocated_bytes": steady.allocated_bytes,
        "peak_reserved_bytes": steady.reserved_bytes,
        "first_step_peak_allocated_bytes": whole.allocated_bytes,
        "first_step_peak_reserved_bytes": whole.reserved_bytes,
        "by_category": {c.name.lower(): steady.by_category.get(c, 0) for c in Category},
        "memory_bytes": total,
        "headroom_bytes": memory.headroom_bytes,
        "fits": memory.fits,
        "fragmentation": memory.fragmentation,
        "peak_at": [{"scope": live.scope, "bytes": live.bytes} for live in steady.live[:12]],
        "oom": None
        if oom is None
        else {
            "scope": oom.scope,
            "requested_bytes": oom.requested_bytes,
            "reserved_bytes": oom.reserved_bytes,
        },
        "busy_s": float(timing.rank_busy_s[cls.members].mean()),
        "iteration_time_s": float(timing.rank_iteration_s[cls.members].max()),
    }


def _collective(outcome: Outcome, use: CollectiveUse) -> Json:
    cluster, call = outcome.cluster, use.call
    placement = cluster.placement(use.ranks)
    nbytes = full_bytes(call, use.group_size)
    cost = collective_cost(
        call.kind,
        nbytes,
        placement,
        cluster,
        backend=call.backend,
        sharing=sharing_of(cluster, placement),
        profile=outcome.profile,
    )
    return {
        "kind": call.kind,
        "group": use.label,
        "group_size": use.group_size,
        "hosts": placement.hosts,
        "backend": call.backend,
        "dtype": call.dtype,
        "algorithm": cost.algorithm,
        "protocol": cost.protocol,
        "count": use.count,
        "bytes": nbytes,
        "seconds_each": use.seconds_each,
        "seconds_total": use.seconds_each * use.count,
        "exposed_seconds": use.exposed_seconds,
        "bus_bandwidth": cost.bus_bandwidth,
    }


def operator_table(outcome: Outcome, most: int = 60) -> list[Json]:
    """Operators of the critical rank's step, those that take longest first: calls of one name together."""
    row = int(outcome.classes.rank_class[outcome.timing.critical_rank])
    slice_ = outcome.classes.classes[row].slice
    device = outcome.cluster.host.device
    events = slice_.events[slice(*slice_.steady)]
    count = np.bincount(events["ref"][events["kind"] == EventKind.OP], minlength=len(slice_.operators))
    rows: dict[tuple[str, str], Json] = {}
    sources: dict[tuple[str, str], set[str]] = defaultdict(set)
    for index in np.flatnonzero(count):
        op = slice_.operators[index]
        cost = cost_of(op, device, outcome.profile)
        if cost.source == "free":
            continue
        key = (op.name, str(cost.kind))
        entry = rows.setdefault(
            key, {"name": op.name, "kind": cost.kind, "count": 0, "flops": 0.0, "bytes": 0.0, "seconds": 0.0}
        )
        times = int(count[index])
        entry["count"] += times
        for name, value in (("flops", cost.flops), ("bytes", cost.bytes), ("seconds", cost.seconds)):
            entry[name] += times * value
        sources[key].add(cost.source)
    for key, entry in rows.items():
        entry["source"] = "+".join(sorted(sources[key]))
    return sorted(rows.values(), key=lambda entry: -entry["seconds"])[:most]
