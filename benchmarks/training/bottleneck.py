"""The published simulator's table against ours, and the measured plateau by a capped transport.

Measured over emulated: what ``windtunnel bottleneck --live`` finds of the examples, over links of four
rates.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import ROOT
from benchmarks.harness.rows import Row, figure, need
from windtunnel.linux import network
from windtunnel.training.bottleneck import netai20, published
from windtunnel.training.bottleneck.measure import compare
from windtunnel.training.bottleneck.run import GBIT, LIVE_RATES
from windtunnel.training.bottleneck.twin import BANDWIDTHS, WORKERS
from windtunnel.training.emulate.program import Script

PUBLISHED = {
    ("resnet50", 16): (8.0, 57.2, 97.0, 99.8, 99.9), ("resnet50", 32): (7.7, 55.4, 94.2, 99.7, 99.7),
    ("resnet50", 64): (7.6, 54.0, 91.0, 99.4, 99.5), ("resnet101", 16): (6.9, 53.1, 95.3, 99.9, 99.9),
    ("resnet101", 32): (6.7, 51.4, 92.3, 99.8, 99.8), ("resnet101", 64): (6.6, 50.0, 89.0, 99.7, 99.7),
    ("vgg16", 16): (2.3, 21.2, 46.3, 65.9, 99.9), ("vgg16", 32): (2.2, 20.5, 44.9, 63.9, 99.7),
    ("vgg16", 64): (2.2, 20.1, 43.9, 62.2, 99.3),
}  # fmt: skip
SOURCE = "github.com/netx-repo/training-bottleneck f81b140: its simulator's rules without its sleeps"
PAPER = "Zhang et al., NetAI 2020, section 2: 56 to 75 % of three models on 64 GPUs at 100 Gb/s"


def netai20_rows(quick: bool) -> Iterator[Row]:
    """All 45 cells."""
    for (model, workers), percent in PUBLISHED.items():
        for bandwidth, known in zip(BANDWIDTHS, percent, strict=True):
            factor = 100 * netai20(published()[model], workers, bandwidth)
            name = f"{model}, {workers} workers, {bandwidth / GBIT:g} Gb/s"
            yield figure(
                name, "%", emulated=factor, goal=f"within 0.5 of {known}", published=known, source=SOURCE,
                met=abs(factor - known) <= 0.5,
            )  # fmt: skip


def measured_rows(quick: bool) -> Iterator[Row]:
    """The plateau that the paper measured at 100 Gb/s, where no transport carries more than so much."""
    for cap in (20, 25):
        for model in published():
            factor = 100 * netai20(published()[model], WORKERS[-1], cap * GBIT)
            yield figure(
                f"{model}, 64 workers, {cap} Gb/s of 100 reached", "%", emulated=factor,
                published=60.0 if model == "vgg16" else None, source=PAPER,
            )  # fmt: skip


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
                met=abs(point.measured - point.emulated) <= 0.05,
            )  # fmt: skip
