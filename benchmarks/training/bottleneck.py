"""Measured over emulated: what ``windtunnel bottleneck --live`` finds of the examples, at four rates.

That all cells of the published simulator are met is a test.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import ROOT
from benchmarks.harness.rows import Row, figure, need
from windtunnel.linux import network
from windtunnel.training.bottleneck.measure import compare
from windtunnel.training.bottleneck.run import GBIT, LIVE_RATES
from windtunnel.training.emulate.program import Script

LLAMA = "--size debug --dtype fp32 --seq 64 --batch 2 --steps 20"
JOBS = {
    "ResNet, DDP": ("train_resnet.py", "--size debug --dtype fp32 --steps 20"),
    "Llama, DDP": ("train_llama.py", f"{LLAMA} --parallel ddp"),
    "Llama, FSDP2": ("train_llama.py", LLAMA),
}  # fmt: skip


def live_rows(quick: bool) -> Iterator[Row]:
    """Two to four ranks at four rates."""
    need(network.missing())
    for name, (script, words) in [*JOBS.items()][: 1 if quick else None]:
        program = Script(ROOT / "examples" / script, tuple(words.split()))
        ranks, rates = ((2,), LIVE_RATES[:1]) if quick else ((2, 3, 4), LIVE_RATES)
        for point in compare(program, ranks, rates, lambda *_: None):
            yield figure(
                f"{name}, {point.ranks} ranks, {point.rate / GBIT:g} Gb/s: scaling factor", "%",
                100 * point.measured, "within 5 points of what is emulated", emulated=100 * point.emulated,
                passed=abs(point.measured - point.emulated) <= 0.05,
            )  # fmt: skip
