"""Clouds' hosts with their published prices, and 176 variants of 22 architectures for them.

Accuracies, operations and parameters are those that torchvision publishes for its ImageNet weights
(pytorch.org/vision/stable/models.html). What a batch takes is reckoned, not measured: operations over a rate
that the hardware reaches on such networks, and a fixed part; load times are the weights over what a disk and
a framework's start allow.
"""

from __future__ import annotations

from dataclasses import dataclass

from windtunnel.serving.variants.model import CPU, Variant


@dataclass(frozen=True)
class Kind:
    """A host to rent: ``price`` an hour, US dollars, on demand in us-east-1 (aws.amazon.com/ec2/pricing)."""

    name: str
    hardware: str
    cores: int
    memory: int
    price: float


KINDS = {
    kind.hardware: kind
    for kind in (
        Kind("m5.2xlarge", CPU, 8, 32 << 30, 0.384),
        Kind("p3.2xlarge", "v100", 1, 16 << 30, 3.06),
        Kind("inf1.2xlarge", "inferentia", 4, 8 << 30, 0.362),
    )
}
ARCHITECTURES = {
    "alexnet": (0.56522, 0.71, 61.1), "vgg16": (0.71592, 15.47, 138.4), "vgg19": (0.72376, 19.63, 143.7),
    "squeezenet1_1": (0.58178, 0.35, 1.2), "resnet18": (0.69758, 1.81, 11.7),
    "resnet34": (0.73314, 3.66, 21.8), "resnet50": (0.76130, 4.09, 25.6), "resnet101": (0.77374, 7.80, 44.5),
    "resnet152": (0.78312, 11.51, 60.2), "densenet121": (0.74434, 2.83, 8.0),
    "densenet201": (0.76896, 4.29, 20.0), "inception_v3": (0.77294, 5.71, 27.2),
    "googlenet": (0.69778, 1.50, 6.6), "mobilenet_v2": (0.71878, 0.30, 3.5),
    "mobilenet_v3_large": (0.74042, 0.22, 5.5), "efficientnet_b0": (0.77692, 0.39, 5.3),
    "resnext50_32x4d": (0.77618, 4.23, 25.0), "resnext101_32x8d": (0.79312, 16.41, 88.8),
    "wide_resnet50_2": (0.78468, 11.40, 68.9), "wide_resnet101_2": (0.78848, 22.75, 126.9),
    "mnasnet1_0": (0.73456, 0.31, 4.4), "shufflenet_v2_x1_0": (0.69362, 0.14, 2.3),
}  # fmt: skip
"""Top-1 accuracy, 1e9 multiply-adds an image, 1e6 parameters."""


@dataclass(frozen=True)
class Way:
    """How an architecture is run: multiply-adds a second, seconds of any batch, bytes a parameter, accuracy
    lost, seconds that a start takes."""

    name: str
    hardware: str
    precision: str
    threads: int
    batch: int
    speed: float
    fixed: float
    width: int = 4
    lost: float = 0.0
    start: float = 0.5


WAYS = (
    Way("cpu-1", CPU, "fp32", 1, 1, 25e9, 2e-3), Way("cpu-4", CPU, "fp32", 4, 4, 80e9, 3e-3),
    Way("cpu-int8-1", CPU, "int8", 1, 1, 60e9, 2e-3, 1, 0.005),
    Way("cpu-int8-4", CPU, "int8", 4, 8, 190e9, 3e-3, 1, 0.005),
    Way("v100-8", "v100", "fp32", 1, 8, 3e12, 4e-3, start=4.0),
    Way("v100-fp16-8", "v100", "fp16", 1, 8, 10e12, 2e-3, 2, start=8.0),
    Way("v100-fp16-32", "v100", "fp16", 1, 32, 14e12, 2e-3, 2, start=10.0),
    Way("inf1-bf16-4", "inferentia", "bf16", 1, 4, 1.5e12, 4e-3, 2, start=6.0),
)  # fmt: skip


def catalogue(architectures: int = len(ARCHITECTURES)) -> tuple[Variant, ...]:
    """Variants of the first ``architectures``."""
    variants = []
    for name, (accuracy, work, parameters) in [*ARCHITECTURES.items()][:architectures]:
        for way in WAYS:
            kind = KINDS[way.hardware]
            load = way.start + parameters * 1e6 * way.width / 200e6
            variants.append(Variant(
                f"{name}:{way.name}", name, "imagenet", "reckoned", way.hardware, way.precision, way.threads,
                way.batch, load, work * 1e9 / way.speed, way.fixed,
                int(3 * parameters * 1e6 * way.width) + (400 << 20), accuracy - way.lost,
                kind.price / 3600 * way.threads / kind.cores,
            ))  # fmt: skip
    return tuple(variants)
