"""How long it takes to choose what to send: DRAGONN's contract against exact top-k and DGC, on equal tensors.

All on one thread of this computer's processor, in turn, without a residual. Exact top-k is what a user of
torch writes; DGC is as GRACE's released code does it: a threshold from a sample of 1 %, a mask of all
elements, thresholds moved until between 0.7 and 1.3 of what is wanted passes, and the indices that are not
zero. Published is DRAGONN's gain against DGC on a GPU, for the compression of whole jobs (Wang et al.,
ICML '22: up to 70 % less time). The floor is what reading the elements once takes, as torch's sum does.

How many steps training takes to a loss: four ranks in this process, each with the gradient of its own part of
the batch, through the codecs and their residuals as they would go over a network. *text*: the byte that
follows sixteen others in the play that lies with the examples, tested on its last tenth. *images*: digits
that are drawn here (`digits`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from statistics import fmean, stdev

import torch
from torch import Tensor, nn

from benchmarks import ROOT
from benchmarks.harness.digits import drawn
from benchmarks.harness.measure import in_turn, ratios, seconds_of
from benchmarks.harness.rows import Row, figure
from windtunnel.training.emulate.calibrate.measure import on_threads
from windtunnel.training.gradsync.live.codecs import find, seed_of
from windtunnel.training.gradsync.live.feedback import Feedback

SIZES = (100_000, 1_000_000, 10_000_000)
DENSITIES = (0.001, 0.01, 0.05)


def encode_rows(quick: bool = False) -> Iterator[Row]:
    """Seconds of each way, and how many times as long as DRAGONN's the others take."""
    with on_threads(1):
        for numel in SIZES:
            gradient = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
            for density in DENSITIES:
                yield from _rows(gradient, density, 3 if quick else 9)


def _rows(gradient: Tensor, density: float, repeats: int) -> Iterator[Row]:
    calls: dict[str, Callable[[], object]] = {
        "dragonn": lambda: find(f"dragonn:{density}").encode(gradient, 1),
        "torch's top-k": lambda: topk_by_torch(gradient, density),
        "DGC by torch": lambda: dgc_by_torch(gradient, density),
        "the floor": lambda: float(gradient.sum()),
    }
    for call in calls.values():
        call()
    times = in_turn({name: partial(seconds_of, call) for name, call in calls.items()}, repeats)
    title = f"{gradient.numel():.0e} elements, {density:.1%}".replace("e+0", "e")
    mine = times.pop("dragonn")
    yield figure(f"{title}: dragonn", "s", mine)
    for name, seconds in times.items():
        # smaller tensors are over in the time that calls take
        judged = name == "torch's top-k" and gradient.numel() == SIZES[-1]
        yield figure(f"{title}: {name} over dragonn", "x", ratios(seconds, mine), ">= 20 x" * judged)


def topk_by_torch(gradient: Tensor, density: float) -> tuple[Tensor, Tensor]:
    """Indices and values."""
    indices = torch.topk(gradient.abs(), max(1, round(gradient.numel() * density)), sorted=False).indices
    return indices, gradient[indices]


def dgc_by_torch(gradient: Tensor, density: float) -> tuple[Tensor, Tensor]:
    """Indices and values."""
    numel, magnitude = gradient.numel(), gradient.abs()
    sample = magnitude[torch.randint(0, numel, (max(1, numel // 100),))]
    threshold = torch.topk(sample, max(1, int(len(sample) * density))).values.min()
    target = max(1, round(numel * density))
    for _ in range(10):
        mask = magnitude >= threshold
        passed = int(mask.sum())
        if 0.7 * target <= passed <= 1.3 * target:
            break
        threshold = threshold * (1.3 if passed > target else 0.7)
    indices = torch.nonzero(mask).view(-1)
    return indices, gradient[indices]


RANKS, BATCH, RATE = 4, 16, 0.05
CODECS = ("fp16", "bf16", "int8", "sign", "dragonn:0.01")
TEXT = ROOT / "examples" / "data" / "coriolanus.txt"
CONTEXT = 16
TARGET, MOST, SEEDS = 300, 6, 3
"""Steps of `none` to the loss, times as many at the most for another, and seeds."""
EVERY, SMOOTHED, TESTED = 10, 5, 2000


@dataclass(frozen=True)
class Job:
    """Training takes examples below ``learnt``, at random; those from ``tested`` on judge it."""

    name: str
    model: Callable[[], nn.Module]
    inputs: Tensor
    labels: Tensor
    learnt: int
    tested: int


def steps_rows(quick: bool = False) -> Iterator[Row]:
    """Steps to a loss, over those of `none`: the loss on the test that `none` has after `TARGET` steps at a
    rate that does not fall. The package's table (`training/gradsync/steps.json`) is of these."""
    with on_threads(1):
        for job in (_images(), _text()):
            reached = [_reached(job, seed, 100 if quick else TARGET) for seed in range(SEEDS)]
            for spec in CODECS[:3] if quick else CODECS:
                over = [
                    _needed(job, spec, seed, loss, MOST * steps) / steps
                    for seed, (steps, loss) in enumerate(reached)
                ]
                note = f"deviation {stdev(over):.2f} of {SEEDS} seeds"
                if max(over) >= MOST:
                    late = sum(ratio >= MOST for ratio in over)
                    note += f"; not reached in {MOST} times the steps by {late}"
                yield figure(f"{job.name}: {spec}", "x", fmean(over), note=note)


def _reached(job: Job, seed: int, steps: int) -> tuple[int, float]:
    """After how many steps `none` had the least loss of so many, and that loss."""
    losses = islice(_losses(job, "none", seed), steps // EVERY)
    place, loss = min(enumerate(losses, 1), key=lambda pair: pair[1])
    return EVERY * place, loss


def _needed(job: Job, spec: str, seed: int, loss: float, most: int) -> int:
    """Steps until that loss; ``most`` where it is not reached before."""
    losses = islice(_losses(job, spec, seed), most // EVERY)
    return next((EVERY * place for place, reached in enumerate(losses, 1) if reached <= loss), most)


def _losses(job: Job, spec: str, seed: int) -> Iterator[float]:
    """Every `EVERY` steps: the loss on the test, the mean of the last `SMOOTHED`."""
    last: deque[float] = deque(maxlen=SMOOTHED)
    inputs, labels = job.inputs[job.tested :][:TESTED], job.labels[job.tested :][:TESTED]
    for model in islice(_training(job, spec, seed), EVERY - 1, None, EVERY):
        with torch.no_grad():
            last.append(float(nn.functional.cross_entropy(model(inputs), labels)))
        yield fmean(last)


def _training(job: Job, spec: str, seed: int) -> Iterator[nn.Module]:
    """The model after each step of SGD with momentum 0.9, at a rate that does not fall."""
    torch.manual_seed(seed)
    model, codec = job.model(), find(spec)
    parameters = dict(model.named_parameters())
    sizes = {name: parameter.numel() for name, parameter in parameters.items()}
    ranks = [Feedback([sizes]) for _ in range(RANKS)]
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    generator = torch.Generator().manual_seed(1000 + seed)
    total = torch.zeros(sum(sizes.values()))
    for step in count():
        rows = []
        for _ in range(RANKS):
            optimizer.zero_grad()
            chosen = torch.randint(0, job.learnt, (BATCH,), generator=generator)
            nn.functional.cross_entropy(model(job.inputs[chosen]), job.labels[chosen]).backward()
            gradients = [parameter.grad for parameter in parameters.values()]
            rows.append(torch.cat([gradient.view(-1) for gradient in gradients if gradient is not None]))
        total.zero_()
        for at, row in enumerate(rows):
            drawn = seed_of(seed, step, 0, 0 if codec.summable else at)
            code = ranks[at].encode(0, row, codec, drawn)
            codec.add(code, total, 1 / RANKS)
        for parameter, part in zip(parameters.values(), total.split(list(sizes.values())), strict=True):
            parameter.grad = part.view_as(parameter).clone()
        optimizer.step()
        yield model


def _images() -> Job:
    inputs, labels = (torch.from_numpy(array) for array in drawn(6000, 1))

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 64), nn.ReLU(),
            nn.Linear(64, 10),
        )  # fmt: skip

    return Job("images", model, inputs, labels, 4000, 4000)


def _text() -> Job:
    data = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long().clamp(max=127)
    windows = data.unfold(0, CONTEXT + 1, 1)
    learnt = len(windows) * 9 // 10

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Embedding(128, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 128), nn.ReLU(), nn.Linear(128, 128)
        )

    return Job("text", model, windows[:, :-1], windows[:, -1], learnt, learnt + CONTEXT)
