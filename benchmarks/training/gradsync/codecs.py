"""How long it takes to choose what to send: DRAGONN's contract against exact top-k and DGC, on equal tensors.

All on one thread of this computer's processor, in turn, without a residual. Exact top-k is what a user of
torch writes; DGC is as GRACE's released code does it: a threshold from a sample of 1 %, a mask of all
elements, thresholds moved until between 0.7 and 1.3 of what is wanted passes, and the indices that are not
zero. Published is DRAGONN's gain against DGC on a GPU, for the compression of whole jobs (Wang et al.,
ICML '22: up to 70 % less time). The floor is what reading the elements once takes, as torch's sum does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from timeit import timeit

import torch
from torch import Tensor

from benchmarks.harness.measure import conditions, in_turn
from benchmarks.harness.rows import Row, figure, left_out
from windtunnel.training.gradsync.live.codecs import find

SIZES = (100_000, 1_000_000, 10_000_000)
DENSITIES = (0.001, 0.01, 0.05)
FASTER = 20.0


def encode_rows(quick: bool = False) -> Iterator[Row]:
    """Seconds of each way, and how many times as long as DRAGONN's the others take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield left_out("host", conditions())
        for numel in SIZES:
            gradient = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
            for density in DENSITIES:
                yield from _rows(gradient, density, 3 if quick else 9)
    finally:
        torch.set_num_threads(threads)


def _rows(gradient: Tensor, density: float, repeats: int) -> Iterator[Row]:
    calls: dict[str, Callable[[], object]] = {
        "dragonn": lambda: find(f"dragonn:{density}").encode(gradient, 1),
        "torch's top-k": lambda: topk_by_torch(gradient, density),
        "DGC by torch": lambda: dgc_by_torch(gradient, density),
        "the floor": lambda: float(gradient.sum()),
    }
    for call in calls.values():
        call()
    found = in_turn({name: partial(timeit, call, number=1) for name, call in calls.items()}, repeats)
    taken = {name: median(one) for name, one in found.items()}
    what = f"{gradient.numel():.0e} elements, {density:.1%}".replace("e+0", "e")
    mine = taken.pop("dragonn")
    yield figure(f"{what}: dragonn", "s", mine)
    for name, seconds in taken.items():
        # smaller tensors are over in the time that calls take
        asked = name == "torch's top-k" and gradient.numel() == SIZES[-1]
        yield figure(
            f"{what}: {name} over dragonn", "x", seconds / mine, f">= {FASTER:.0f} x" if asked else "",
        )  # fmt: skip


def topk_by_torch(gradient: Tensor, density: float) -> tuple[Tensor, Tensor]:
    """Indices and values."""
    indices = torch.topk(gradient.abs(), max(1, round(gradient.numel() * density)), sorted=False).indices
    return indices, gradient[indices]


def dgc_by_torch(gradient: Tensor, density: float) -> tuple[Tensor, Tensor]:
    """Indices and values."""
    numel, magnitude = gradient.numel(), gradient.abs()
    sample = magnitude[torch.randint(0, numel, (max(1, numel // 100),))]
    threshold = torch.topk(sample, max(1, int(len(sample) * density))).values.min()
    wanted = max(1, round(numel * density))
    for _ in range(10):
        mask = magnitude >= threshold
        passed = int(mask.sum())
        if 0.7 * wanted <= passed <= 1.3 * wanted:
            break
        threshold = threshold * (1.3 if passed > wanted else 0.7)
    indices = torch.nonzero(mask).view(-1)
    return indices, gradient[indices]
