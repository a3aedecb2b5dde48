"""Requests beside bulk flows in the packet engine, five seeds each. Emulated."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.harness.measure import spread
from benchmarks.harness.rows import Row, figure
from windtunnel.network.hostrate.twin import ARMS, BulkTenant, WindowResult, emulate

FLOWS = (1, 8, 24, 64)


def twin_rows(quick: bool) -> Iterator[Row]:
    """Every arm at every count of flows."""
    seeds, seconds = (range(2), 0.5) if quick else (range(5), 2.0)
    for flows in FLOWS[:2] if quick else FLOWS:
        found = {
            arm: [emulate([BulkTenant("bulk", flows)], arm, seconds, seed) for seed in seeds]
            for arm in ARMS
            if arm != "free"
        }
        cubic, full = _latency(found["cubic"]), _goodput(found["cubic"])
        for arm, outcomes in found.items():
            took, part = _latency(outcomes), _goodput(outcomes) / full
            goal = ">= 15x under CUBIC's at >= 95% of its throughput" if arm == "weights" else ""
            yield figure(
                f"{flows} flows, {arm}: a request", "ms", goal=goal, emulated=took * 1e3,
                met=cubic / took >= 15 and part >= 0.95,
                note=f"{cubic / took:.1f}x under CUBIC; bulk {_goodput(outcomes) * 8e-6:.1f} Mb/s"
                f" ({part:.1%}); {spread(one.wait for one in outcomes).median:.1f} packets wait",
            )  # fmt: skip


def _latency(outcomes: list[WindowResult]) -> float:
    return spread(one.latency for one in outcomes).median


def _goodput(outcomes: list[WindowResult]) -> float:
    return spread(sum(one.goodput) for one in outcomes).median
