"""Real variants on this host: three small networks, trained here on digits that are drawn here."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from windtunnel.bench import digits
from windtunnel.bench.measure import in_turn, scratch
from windtunnel.bench.rows import Row
from windtunnel.serving.variants.live.registry import Entry, add
from windtunnel.serving.variants.live.service import Service
from windtunnel.serving.variants.model import Variant

WIDTHS = {"small": 4, "medium": 24, "large": 64}
drawn = partial(digits.drawn, scale=3, noise=0.4, strength=(0.4, 1.0))
"""Digits of 15 by 21 dots."""
CLASSES = ((0.0, 0.02), (0.9, 0.05), (0.97, 0.2))
"""Accuracy and seconds that requests ask for, a third of them each."""
SOURCE = "INFaaS, ATC 2021, abstract"


def trained(width: int) -> nn.Module:
    """A network of so many channels after 200 steps."""
    torch.manual_seed(width)
    model = nn.Sequential(
        nn.Conv2d(1, width, 3, stride=2), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, stride=2), nn.ReLU(),
        nn.Conv2d(2 * width, 2 * width, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(8 * width, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    images, labels = (torch.from_numpy(one) for one in drawn(6400, 1))
    for step in range(200):
        at = step * 32 % 6400
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[at : at + 32]), labels[at : at + 32]).backward()
        optimizer.step()
    return model.eval()


def submitted(folder: Path) -> list[Entry]:
    """All variants of the three networks."""
    images, labels = drawn(1000, 2)
    np.savez(folder / "digits.npz", inputs=images, labels=labels)
    entries: list[Entry] = []
    for name, width in WIDTHS.items():
        torch.save(trained(width), folder / f"{name}.pt")
        data, home = folder / "digits.npz", folder / "variants"
        entries += add(folder / f"{name}.pt", data, home, task="digits", architecture=name, compiled=False)[0]
    return entries


def live_rows(quick: bool) -> Iterator[Row]:
    """Variants against the one that does all that anybody asks for, under a load of 0.6 of what that does on
    all cores."""
    with scratch() as folder:
        entries = submitted(folder)
        variants = [one.variant for one in entries]
        for one in variants:
            if one.batch == 8 and one.threads == 1:
                words = f"{one.accuracy:.2%} right, a batch takes {one.latency(8) * 1e3:.2f} ms"
                yield Row("live", f"{one.name}: one", "s", one.latency(), note=words)
        best = max(one.accuracy for one in variants)
        single = min(
            (one for one in variants if one.accuracy >= min(CLASSES[-1][0], best) and one.batch == 8),
            key=lambda one: one.cost,
        )  # the cheapest that is accurate enough for all
        rate = min(600.0, 0.6 * single.rate * (os.cpu_count() or 1) / single.threads)
        seconds = 3.0 if quick else 12.0
        pinned = dict.fromkeys(WIDTHS, single.name)
        arms = {
            name: (lambda name=name: asyncio.run(_loaded(entries, name, pinned, rate, seconds, best)))
            for name in ("cheapest", "infaas", "shared")
        }
        found = in_turn(arms, 1 if quick else 5)
    middle = {name: [median(column) for column in zip(*rows, strict=True)] for name, rows in found.items()}
    for name in ("cheapest", "infaas"):
        mine, base = middle[name], middle["shared"]
        spread = ", ".join(f"{row[1]:.2%}" for row in found[name])
        note = f"{rate:.0f} requests/s; late {mine[1]:.2%} ({spread}) against {base[1]:.2%} of {single.name}"
        yield Row("live", f"{name}: answered in time over one variant", "x", mine[0] / base[0], published=1.3,
                  source=SOURCE, note=note)  # fmt: skip
        yield Row("live", f"{name}: fewer late than of one variant", "x",
                  base[1] / mine[1] if mine[1] else None, published=1.6,
                  source=SOURCE, note=note)  # fmt: skip
        yield Row("live", f"{name}: core-seconds of one variant over ours", "x", base[2] / mine[2],
                  published=8.5, source=SOURCE, note="published: dollars, with accelerators")  # fmt: skip


async def _loaded(
    entries: list[Entry], policy: str, pinned: dict[str, str], rate: float, seconds: float, best: float
) -> tuple[float, float, float]:
    """Answered in time a second, the part that was late, and core-seconds of replicas for each answer."""
    images, _ = drawn(64, 3)
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.exponential(1 / rate, int(rate * seconds)))
    loop = asyncio.get_running_loop()
    async with Service(entries, policy=policy, pinned=pinned) as service:
        for accuracy, latency in CLASSES:  # loaded once, as in a service that has been there for a while
            await service.infer(
                "digits", {"input": images[:1]}, accuracy=min(accuracy, best), latency=latency
            )
        busy, began = service.busy, loop.time()

        async def one(number: int, at: float) -> bool:
            await asyncio.sleep(began + at - loop.time())
            accuracy, latency = CLASSES[number % len(CLASSES)]
            place, since = number % 64, loop.time()
            await service.infer(
                "digits", {"input": images[place : place + 1]}, accuracy=min(accuracy, best), latency=latency
            )
            return loop.time() - since <= latency

        done = await asyncio.gather(*(one(number, at) for number, at in enumerate(times.tolist())))
        return sum(done) / seconds, 1 - sum(done) / len(done), (service.busy - busy) / len(done)


def crash_rows(quick: bool) -> Iterator[Row]:
    """Replicas are killed while they answer; every request is to be answered once, and rightly."""
    with scratch() as folder:
        model = trained(WIDTHS["medium"])
        images, labels = drawn(128, 4)
        np.savez(folder / "digits.npz", inputs=images, labels=labels)
        torch.save(model, folder / "medium.pt")
        entries, _ = add(
            folder / "medium.pt",
            folder / "digits.npz",
            folder,
            task="digits",
            architecture="medium",
            compiled=False,
        )
        with torch.no_grad():
            wanted = model(torch.from_numpy(images)).numpy()
        count = 300 if quick else 2000
        right, killed, requeued, answered = asyncio.run(
            _killed(entries[0].variant, entries, images, wanted, count)
        )
    note = f"{killed} replicas killed with signal 9, {requeued} requests given to another"
    yield Row("crash", "requests without their answer", "", (count - right) / count, target="none",
              met=right == count and killed > 0, note=note)  # fmt: skip
    yield Row("crash", "answered more than once", "", (answered - count) / count, target="none",
              met=answered == count, note=note)  # fmt: skip


async def _killed(
    variant: Variant,
    entries: list[Entry],
    images: NDArray[np.float32],
    wanted: NDArray[np.float32],
    count: int,
) -> tuple[int, int, int, int]:
    killed = right = 0
    async with Service(entries) as service:
        for first in range(0, count, 20):

            async def one(number: int) -> bool:
                place = number % len(images)
                _, [(_, made)] = await service.infer(variant.name, {"input": images[place : place + 1]})
                return bool(np.abs(made - wanted[place : place + 1]).max() < 1e-3)

            asked = asyncio.gather(*(one(number) for number in range(first, first + 20)))
            await asyncio.sleep(0)
            if first % 100 == 40:
                for pid in service.pids():
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
            right += sum(await asked)
        groups = [one.group for one in service.groups.values()]
        return right, killed, sum(one.requeued for one in groups), sum(one.answered for one in groups)
