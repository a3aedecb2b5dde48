"""The jobs that the papers measured, as far as their shapes are public: gradients, their order and times.

Parameters are those of the models as published (He et al. '15; Simonyan and Zisserman '14; Devlin et al. '18;
Radford et al. '19; Kim et al. '19 for UGATIT; PyTorch's word language model of two layers of 1,500). Seconds
are inference: the operations of a batch, a third of them forward, over what the device sustains in float32
with `REACHED` of its peak. Tables of DeepFM, NMT and the LSTM of ZEN (OSDI '25) have the densities that it
gives; their numbers of rows and growth over ranks are inference, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from windtunnel.cluster.model import Cluster
from windtunnel.training.gradsync.model import GradientTensor, Profile
from windtunnel.training.gradsync.twin.costs import codecs_of, network_of

REACHED = 0.5


@dataclass(frozen=True)
class Layer:
    """Parameters in the order of forward; ``flops``: of forward for one sample. ``width``, ``density``: of a
    table of which a batch touches rows."""

    name: str
    numels: tuple[int, ...]
    flops: float
    width: int = 0
    density: float = 1.0


def _linear(name: str, inputs: int, outputs: int, times: float = 1.0) -> Layer:
    return Layer(name, (inputs * outputs, outputs), 2.0 * inputs * outputs * times)


def _conv(name: str, inputs: int, outputs: int, size: int, pixels: int, norm: bool = False) -> Layer:
    weights = inputs * outputs * size * size
    extra = (outputs, outputs) if norm else (outputs,)
    return Layer(name, (weights, *extra), 2.0 * weights * pixels)


def vgg16() -> Iterator[Layer]:
    inputs, side = 3, 224
    for block, (outputs, layers) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))):
        for layer in range(layers):
            yield _conv(f"conv{block}.{layer}", inputs, outputs, 3, side * side)
            inputs = outputs
        side //= 2
    for place, (ins, outs) in enumerate(((25088, 4096), (4096, 4096), (4096, 1000))):
        yield _linear(f"fc{place}", ins, outs)


def resnet101() -> Iterator[Layer]:
    yield _conv("stem", 3, 64, 7, 112 * 112, norm=True)
    inputs, side = 64, 56
    for stage, blocks in enumerate((3, 4, 23, 3)):
        width = 64 << stage
        for block in range(blocks):
            pixels = side * side
            at = f"stage{stage}.{block}"
            yield _conv(f"{at}.a", inputs, width, 1, pixels, norm=True)
            yield _conv(f"{at}.b", width, width, 3, pixels, norm=True)
            yield _conv(f"{at}.c", width, 4 * width, 1, pixels, norm=True)
            if block == 0:
                yield _conv(f"{at}.shortcut", inputs, 4 * width, 1, pixels, norm=True)
            inputs = 4 * width
        side //= 2
    yield _linear("fc", 2048, 1000)


def transformer(layers: int, width: int, tokens: int, words: int, places: int, head: bool) -> Iterator[Layer]:
    yield Layer("embedding", (words * width, places * width), 0.0)
    for layer in range(layers):
        for name, ins, outs in (
            ("q", width, width), ("k", width, width), ("v", width, width), ("out", width, width),
            ("up", width, 4 * width), ("down", 4 * width, width),
        ):  # fmt: skip
            yield _linear(f"{layer}.{name}", ins, outs, tokens)
        yield Layer(f"{layer}.norms", (width,) * 4, 0.0)
    if head:
        yield _linear("head", width, width, tokens)


def lstm() -> Iterator[Layer]:
    tokens, width, words = 35, 1500, 33_278
    yield Layer("embedding", (words * width,), 2.0 * words * width * tokens)
    for layer in range(2):
        yield Layer(
            f"lstm{layer}", (4 * width * width,) * 2 + (4 * width,) * 2, 16.0 * width * width * tokens
        )


def ugatit() -> Iterator[Layer]:
    for generator in range(2):
        at, side = f"generator{generator}", 256
        yield _conv(f"{at}.in", 3, 64, 7, side * side)
        yield _conv(f"{at}.down0", 64, 128, 3, side * side // 4)
        yield _conv(f"{at}.down1", 128, 256, 3, side * side // 16)
        for block in range(8):
            for half in "ab":
                yield _conv(f"{at}.block{block}{half}", 256, 256, 3, side * side // 16)
        yield _linear(f"{at}.fc", 64 * 64 * 256, 256)
        yield _conv(f"{at}.up0", 256, 128, 3, side * side // 4)
        yield _conv(f"{at}.up1", 128, 64, 3, side * side)
    for critic in range(4):
        inputs = 3
        for layer, outputs in enumerate((64, 128, 256, 512, 1024)[: 5 if critic % 2 else 4]):
            yield _conv(f"critic{critic}.{layer}", inputs, outputs, 4, (128 >> layer) ** 2)
            inputs = outputs


def tables(rows: int, width: int, density: float, dense: int, flops: float) -> Iterator[Layer]:
    yield Layer("tables", (rows * width,), 0.0, width, density)
    for layer in range(4):
        yield Layer(f"mlp{layer}", (dense // 4,), flops / 4)


JOBS: dict[str, tuple[Callable[[], Iterator[Layer]], int]] = {
    "VGG-16": (vgg16, 32), "ResNet-101": (resnet101, 32), "UGATIT": (ugatit, 2), "LSTM": (lstm, 80),
    "BERT-base": (partial(transformer, 12, 768, 128, 30_522, 514, True), 32),
    "GPT-2": (partial(transformer, 12, 768, 1024, 50_257, 1024, False), 4),
    "DeepFM": (partial(tables, 13_375_000, 16, 0.028, 68_000_000, 2 * 68e6), 1024),
    "NMT": (partial(tables, 112_000, 1000, 0.0247, 31_000_000, 2 * 31e6 * 50), 64),
    "LSTM, billion words": (partial(tables, 793_000, 512, 0.0113, 20_000_000, 2 * 20e6 * 20), 128),
}  # fmt: skip
"""With the samples of a rank's batch."""


def paper_profile(name: str, cluster: Cluster) -> Profile:
    """The job of that name on a cluster."""
    layers, batch = JOBS[name]
    device = cluster.host.device
    rate = device.peak("float32") * device.sustained * REACHED
    found, forward = [], 0.0
    for layer in layers():
        seconds = batch * layer.flops / rate
        forward += seconds
        total = sum(layer.numels)  # backward takes twice as long as forward
        for place, numel in enumerate(layer.numels):
            growth = tuple(2.0**level * 0.8**level for level in range(1, 8)) if layer.width else ()
            found.append(
                GradientTensor(
                    f"{layer.name}.{place}", numel, 2 * seconds * numel / total, width=layer.width,
                    density=layer.density, growth=growth,
                )
            )  # fmt: skip
    return Profile(
        tuple(found[::-1]), codecs_of(cluster), network_of(cluster), forward,
        emulated=f"{name} on {cluster.name}",
    )  # fmt: skip
