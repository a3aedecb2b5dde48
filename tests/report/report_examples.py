"""A made-up run of a plausible size: what the report's tests (and its author) look at."""

from __future__ import annotations

from typing import Any

import numpy as np

from windtunnel.report.timeline import HeatMap, MemoryTimeline, Timeline, Track

GIB = float(2**30)
CATEGORIES = ("parameter", "gradient", "optimizer", "activation", "communication", "temporary")


def summary() -> dict[str, Any]:
    """Llama 8B under FSDP2 and two pipeline stages on 128 devices, of which the second stage does not fit."""
    path = {
        "compute": 2.3131,
        "communication:dp": 0.2214,
        "communication:tp": 0.0882,
        "pipeline_bubble": 0.1517,
        "launch": 0.0391,
        "idle": 0.0107,
    }
    iteration = sum(path.values())
    return {
        "schema": "windtunnel.emulate/2",
        "run_id": "20261121-030405-ab12",
        "created_at": "2026-11-21T03:04:05+00:00",
        "versions": {"windtunnel": "0.1.0", "torch": "2.13.0+cpu", "python": "3.11.7"},
        "command": {
            "script": "examples/train_llama.py",
            "args": [
                "--size",
                "8b",
                "--parallel",
                "fsdp",
                "--seq",
                "8192",
                "--batch",
                "2",
                "--ac",
                "selective",
            ],
            "options": {"cluster": "h100-96:16x8", "ranks": "auto", "steps": 2, "slow": None},
        },
        "cluster": {
            "name": "h100-96:16x8",
            "hosts": 16,
            "devices_per_host": 8,
            "device": "h100-96",
            "topology": "rail-optimised",
            "nic": "ib-400",
            "intra": "nvlink-4",
        },
        "world_size": 128,
        "captured_ranks": "0,63-64,127",
        "checked_ranks": "7,96",
        "assumed_ranks": "1-6,8-62,65-95,97-126",
        "steps_captured": 2,
        "iteration_time_s": iteration,
        "first_iteration_time_s": 9.871,
        "tokens_per_iteration": 2_097_152,
        "tokens_per_second_per_device": 2_097_152 / 128 / iteration,
        "model_flops_per_iteration": 1.19e17,
        "hardware_flops_per_iteration": 1.34e17,
        "flops_dtype": "bfloat16",
        "joules_per_iteration": None,
        "cost_per_iteration": None,
        "critical_rank": 63,
        "mfu": 0.3331,
        "hfu": 0.3751,
        "critical_path": path,
        "waits": [
            {
                "what": "exposed all_gather over dp (64 ranks) in forward",
                "seconds": 0.1703,
                "share": 0.1703 / iteration,
                "remedy": "Prefetch parameters earlier, keep them after forward (reshard_after_forward=False)"
                " where memory allows, shard within fewer hosts (HSDP), or use a faster network.",
            },
            {
                "what": "other pipeline stages (pipeline bubble)",
                "seconds": 0.1517,
                "share": 0.1517 / iteration,
                "remedy": "More microbatches, an interleaved or zero-bubble schedule, or fewer stages.",
            },
            {
                "what": "exposed all_reduce over tp (8 ranks) in backward",
                "seconds": 0.0882,
                "share": 0.0882 / iteration,
                "remedy": "Use a smaller TP, sequence parallelism with asynchronous TP.",
            },
        ],
        "ranks": [_rank_class("pp=0", 0, 61.2, 66.9), _rank_class("pp=1", 64, 88.7, 97.3)],
        "collectives": [
            _collective("all_gather", "dp", 64, 8, 66, 436_207_616, 2.91e-3, 0.1703),
            _collective("reduce_scatter", "dp", 64, 8, 33, 872_415_232, 5.72e-3, 0.0511),
            _collective("all_reduce", "tp", 8, 1, 132, 134_217_728, 6.8e-4, 0.0882),
            _collective("send", "pp", 2, 2, 8, 67_108_864, 1.4e-3, 0.0),
        ],
        "operators": [
            {
                "name": name,
                "kind": kind,
                "count": count,
                "flops": flops,
                "bytes": size,
                "seconds": seconds,
                "source": source,
            }
            for name, kind, count, flops, size, seconds, source in (
                ("aten.mm.default", "matmul", 1540, 7.9e14, 4.1e11, 1.61, "profile h100-96"),
                (
                    "aten._scaled_dot_product_flash_attention",
                    "attention",
                    64,
                    1.2e14,
                    3.1e10,
                    0.31,
                    "roofline",
                ),
                ("aten.mul.Tensor", "elementwise", 980, 1.1e11, 9.4e11, 0.29, "roofline"),
                ("aten._fused_adamw_.default", "optimizer", 12, 6.3e9, 2.2e11, 0.07, "roofline"),
                ("aten.embedding.default", "embedding", 1, 0.0, 2.7e8, 1.2e-4, "roofline"),
            )
        ],
        "provenance": {
            "iteration_time_s": "emulated",
            "mfu": "emulated",
            "model_flops_per_iteration": "declared",
            "wall_time_s": "measured",
            "peak_rss_bytes": "measured",
            "memory_bytes": "published",
        },
        "approximations": ["torch.compile regions are taken as one fused kernel for each elementwise chain."],
        "warnings": ["train_llama.py:212 reads loss.item(): the value is a stand-in, 1.0 <not computed>."],
        "replay": {"simulated_ranks": 2, "events": 84_120, "seed": 0},
        "directory": "/runs/20261121-030405-ab12",
        "capture_time_s": 33.1,
        "wall_time_s": 41.7,
        "peak_rss_bytes": 2.31 * GIB,
        "period": None,
        "verdict": None,
    }


def _rank_class(name: str, first: int, allocated: float, reserved: float) -> dict[str, Any]:
    parts = dict(zip(CATEGORIES, (0.08, 0.08, 0.16, 0.52, 0.10, 0.06), strict=True))
    memory = 94.0 * GIB
    return {
        "name": name,
        "members": f"{first}-{first + 63}",
        "count": 64,
        "captured": f"{first},{first + 63}",
        "peak_allocated_bytes": allocated * GIB,
        "peak_reserved_bytes": reserved * GIB,
        "first_step_peak_allocated_bytes": 1.01 * allocated * GIB,
        "first_step_peak_reserved_bytes": 1.02 * reserved * GIB,
        "fragmentation": 1 - allocated / reserved,
        "by_category": {key: value * allocated * GIB for key, value in parts.items()},
        "memory_bytes": memory,
        "headroom_bytes": memory - 1.02 * reserved * GIB - 500 * 2**20,
        "fits": reserved * GIB <= memory,
        "peak_at": [
            {"scope": "layers.15.attention", "bytes": 0.21 * allocated * GIB},
            {"scope": "layers.15.feed_forward", "bytes": 0.19 * allocated * GIB},
            {"scope": "output", "bytes": 0.07 * allocated * GIB},
        ],
        "oom": None
        if reserved * GIB <= memory
        else {
            "scope": "layers.15.feed_forward",
            "requested_bytes": 2.0 * GIB,
            "reserved_bytes": 92.9 * GIB,
            "by_category": {key: value * 90 * GIB for key, value in parts.items()},
            "held": [{"scope": "optimizer state", "bytes": 14.4 * GIB, "blocks": 64}],
            "allocated_bytes": 90 * GIB,
            "event": 4711,
        },
        "busy_s": 2.31,
        "iteration_time_s": 2.8242,
    }


def _collective(
    kind: str, group: str, size: int, hosts: int, count: int, bytes_: int, each: float, exposed: float
) -> dict[str, Any]:
    return {
        "kind": kind,
        "group": group,
        "group_size": size,
        "hosts": hosts,
        "backend": "nccl",
        "dtype": "bfloat16",
        "algorithm": "ring",
        "protocol": "Simple",
        "count": count,
        "bytes": bytes_,
        "seconds_each": each,
        "seconds_total": each * count,
        "exposed_seconds": exposed,
        "bus_bandwidth": bytes_ * (size - 1) / size / each,
    }


def timeline(ranks: int = 4, spans: int = 600, seed: int = 0) -> Timeline:
    """``ranks`` ranks with a host, a compute and a communication queue of ``spans`` spans each."""
    names = [
        *(f"layers.{i}.{part}: aten.mm" for i in range(16) for part in ("attention", "feed_forward")),
        *("aten._scaled_dot_product_flash_attention", "all_gather dp", "reduce_scatter dp", "issue", "idle"),
    ]
    generator = np.random.default_rng(seed)
    tracks = []
    for rank in range(ranks):
        for queue, kind, load in (("host", 3, 0.6), ("compute", 0, 0.92), ("nccl dp", 1, 0.4)):
            widths = generator.lognormal(0, 1.2, spans)
            widths *= 2.8 / widths.sum()
            start = np.concatenate([[0.0], np.cumsum(widths)[:-1]])
            low, high = {0: (0, 33), 1: (33, 35), 3: (35, 36)}[kind]
            tracks.append(
                Track(
                    rank=rank * 16,
                    queue=queue,
                    start=start,
                    end=start + widths * load,
                    name=generator.integers(low, high, spans).astype(np.int32),
                    kind=np.full(spans, kind, np.int32),
                )
            )
    return Timeline(tracks, names)


def memory_curves(points: int = 2000) -> list[MemoryTimeline]:
    time = np.linspace(0, 1, points)
    curves = []
    for name, scale in (("pp=0", 61.2), ("pp=1", 88.7)):
        wave = np.clip(1 - np.abs(time - 0.42) / 0.46, 0, 1)
        ripple = 0.02 * np.abs(np.sin(time * 200))
        parts = {
            "parameter": np.full(points, 0.08),
            "gradient": 0.08 * np.clip((time - 0.42) * 3, 0, 1),
            "optimizer": np.full(points, 0.16),
            "activation": 0.52 * wave,
            "communication": 0.05 + 0.05 * (np.sin(time * 130) > 0),
            "temporary": 0.03 + ripple,
        }
        by_category = {key: value * scale * GIB for key, value in parts.items()}
        allocated = np.sum(list(by_category.values()), axis=0)
        reserved = np.maximum.accumulate(allocated) * 1.06
        curves.append(MemoryTimeline(name, time, allocated, reserved, by_category, 94.0 * GIB))
    return curves


def heat_map(hosts: int = 16, devices: int = 8) -> HeatMap:
    generator = np.random.default_rng(1)
    value = 2.31 + 0.02 * generator.standard_normal((hosts, devices))
    value[min(3, hosts - 1)] *= 1.08
    return HeatMap("Busy time of the compute queue", value, "s")
