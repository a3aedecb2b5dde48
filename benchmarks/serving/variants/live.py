"""Real variants on this host: three small networks, trained here on digits that are drawn here."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import count
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from benchmarks.harness import digits
from benchmarks.harness.measure import in_turn, scratch
from benchmarks.harness.rows import Row, figure
from windtunnel.serving.variants.live.registry import VariantFile, add
from windtunnel.serving.variants.live.service import Unanswered, VariantsService
from windtunnel.traces.rates import arrivals

NETWORKS = {"small": (24, 1, 0), "medium": (64, 1, 0), "large": (64, 4, 1)}
"""Channels, how many of that are trained, and by how many dots the views are shifted that each looks at."""
drawn = partial(digits.drawn, scale=3, noise=0.4, strength=(0.4, 1.0))
"""Digits of 15 by 21 dots."""
CLASSES = ((0.85, 0.05), (0.9, 0.1), (1.0, 0.25))
"""Accuracy (within `POINT` of the best one's at most) and seconds that requests ask for, a third each."""
POINT = 0.01
ITEMS = 4
"""Images of a request."""
LOADS = {"half": (0.5, 0.5), "bursts": (0.4, 1.6)}
"""Of what the best single variant does on all cores by its profile, in one second and the next."""
WARM = 2
"""Seconds of load that are not counted, in which replicas come."""
SOURCE = "INFaaS, ATC 2021, abstract"


class Together(nn.Module):
    """Networks that look at an image in all shifts of so many dots: slower than one, and more accurate."""

    def __init__(self, nets: Sequence[nn.Module], reach: int) -> None:
        super().__init__()
        self.nets, self.reach = nn.ModuleList(nets), reach

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images [n, 1, side, side]; what is made of their views on average, [n, 10]."""
        places, side = range(2 * self.reach + 1), images.shape[-1]
        wide = nn.functional.pad(images, (self.reach,) * 4)
        views = torch.cat(
            [wide[:, :, row : row + side, column : column + side] for row in places for column in places]
        )
        outputs = torch.stack([net(views) for net in self.nets]).mean(0)
        return outputs.reshape(len(places) ** 2, -1, 10).mean(0)


@cache
def trained(width: int, seed: int = 0) -> nn.Module:
    """A network of so many channels after 200 steps."""
    torch.set_num_threads(1)  # on a busy host several wait for each other at every step
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, width, 3, stride=2), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, stride=2), nn.ReLU(),
        nn.Conv2d(2 * width, 2 * width, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(8 * width, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    images, labels = (torch.from_numpy(array) for array in drawn(6400, 1))
    for step in range(200):
        at = step * 32 % 6400
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[at : at + 32]), labels[at : at + 32]).backward()
        optimizer.step()
    return model.eval()


@cache
def network(name: str) -> nn.Module:
    width, number, reach = NETWORKS[name]
    return Together([trained(width, seed) for seed in range(number)], reach).eval()


def submitted(folder: Path, *names: str) -> list[VariantFile]:
    """All variants of these networks, as ONNX."""
    images, labels = drawn(400, 2)
    np.savez(folder / "digits.npz", inputs=images, labels=labels)
    entries: list[VariantFile] = []
    for name in names:
        file = folder / f"{name}.onnx"
        torch.onnx.export(
            network(name), (torch.from_numpy(images[:2]),), str(file), dynamo=True, input_names=["input"],
            dynamic_shapes=({0: torch.export.Dim("batch")},), verbose=False, external_data=False,
        )  # fmt: skip
        entries += add(file, folder / "digits.npz", folder, task="digits", architecture=name)[0]
    return entries


def live_rows(quick: bool) -> Iterator[Row]:
    """Variants against each single one that is accurate enough for all requests, and against requests that
    name the cheapest variant that does what they want."""
    with scratch() as folder:
        entries = submitted(folder, *NETWORKS)
        variants = [entry.variant for entry in entries if entry.variant.batch == 8]
        for entry in variants:
            if entry.threads == 1:
                words = f"{entry.accuracy:.2%} right, a batch takes {entry.latency(8) * 1e3:.2f} ms"
                yield figure(f"{entry.name}: one", "s", entry.latency(), note=words)
        best = max(variant.accuracy for variant in variants)
        accuracies = [min(accuracy, best - POINT) for accuracy, _ in CLASSES]
        each = [[variant for variant in variants if variant.accuracy >= accuracy] for accuracy in accuracies]
        named = [min(some, key=attrgetter("cost")).name for some in each]
        single = {  # of each precision the one that does most with a core
            variant.precision: variant for variant in sorted(each[-1], key=attrgetter("cost"), reverse=True)
        }
        # a slow host's variants are in time, too
        least = 2 * max(variant.latency(ITEMS) for variant in single.values())
        objectives = [
            (accuracy, max(least, latency))
            for accuracy, (_, latency) in zip(accuracies, CLASSES, strict=True)
        ]
        most = max(1 / variant.cost for variant in single.values()) * (os.cpu_count() or 1) / ITEMS
        for load, parts in LOADS.items():
            counts = most * np.array([parts[0]] * WARM + [*parts] * 2)

            def arm(
                policy: str, pin: str, names: list[str], counts: NDArray[np.float64] = counts
            ) -> Callable[[], Sums]:
                seeds, pinned = count(), dict.fromkeys(NETWORKS, pin)
                return lambda: asyncio.run(
                    _loaded(entries, policy, pinned, counts, next(seeds), objectives, names)
                )

            tasks = ["digits"] * len(objectives)
            arms = {name: arm(name, "", tasks) for name in ("cheapest", "infaas")}
            arms["by name"] = arm("no-upgrade", "", named)
            arms |= {
                f"only {variant.name}": arm("shared", variant.name, tasks) for variant in single.values()
            }
            yield from _compared(
                f"{load}, {counts[WARM:].mean():.0f} requests/s", in_turn(arms, 1 if quick else 3)
            )


def _compared(load: str, sums: dict[str, list[Sums]]) -> Iterator[Row]:
    """What each arm did, and ``cheapest`` over each of the others, repeat by repeat: the same requests."""
    for name, mine in sums.items():
        words = f"core-seconds an answer {median(run.cost for run in mine):.3g}"
        parts = [run.missed / max(1, run.in_time + run.missed) for run in mine]
        yield figure(f"{load}: {name}: late or shed", "", parts, note=words)
    ours = sums.pop("cheapest")
    for name, theirs in sums.items():
        pairs = list(zip(ours, theirs, strict=True))
        for measure, over, published in (
            ("answered in time", [own.in_time / max(1, two.in_time) for own, two in pairs], 1.3),
            (
                "fewer late or shed",
                [max(1, two.missed) / max(1, own.missed) for own, two in pairs],
                1.6,
            ),
            ("core-seconds an answer, less", [two.cost / own.cost for own, two in pairs], 8.5),
        ):
            words, published_figure = (
                f"{load}: cheapest over {name}: {measure}",
                published if name.startswith("only") else None,
            )
            yield figure(words, "x", over, published=published_figure, source=SOURCE)


class Sums(NamedTuple):
    """Requests in time, those late or shed, and seconds of cores that replicas held for each answer."""

    in_time: int
    missed: int
    cost: float


async def _loaded(
    entries: list[VariantFile], policy: str, pinned: dict[str, str], counts: NDArray[np.float64], seed: int,
    objectives: list[tuple[float, float]], named: list[str],
) -> Sums:  # fmt: skip
    """``counts``: requests of each second, on average; ``named``: whom each class of them asks."""
    images, _ = drawn(64, 3)
    rng = np.random.default_rng(seed)
    times = arrivals(counts, rng)
    loop = asyncio.get_running_loop()
    async with VariantsService(entries, policy=policy, pinned=pinned) as service:

        async def respond(number: int, which: int, at: float) -> str:
            await asyncio.sleep(began + at - loop.time())
            accuracy, latency = objectives[which]
            place, since = number % 16 * ITEMS, loop.time()
            inputs = {"input": images[place : place + ITEMS]}
            try:
                await service.infer(named[which], inputs, accuracy=accuracy, latency=latency)
            except Unanswered as fault:
                if not fault.after:
                    raise
                return "shed"
            return "in time" if loop.time() - since <= latency else "late"

        began = loop.time()
        for which in range(len(objectives)):  # loaded once, as in a service that has been there for a while
            while await respond(0, which, 0.0) == "shed":
                await asyncio.sleep(0.1)
        busy, began = service.busy, loop.time()
        coming = (respond(number, number % len(objectives), at) for number, at in enumerate(times.tolist()))
        results = await asyncio.gather(*coming)
        done = [result for result, at in zip(results, times, strict=True) if at >= WARM]
        answered = max(1, len(results) - results.count("shed"))
        in_time = done.count("in time")
        return Sums(in_time, len(done) - in_time, (service.busy - busy) / answered)
