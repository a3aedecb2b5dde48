"""Samples of many devices: what they are, and who has which.

*digits*: 1,797 pictures of 8 x 8 of scikit-learn (Alpaydin and Kaynak, UCI). *synthetic:A,B*: FedProx's
family of 60 features and 10 classes, where A says how much the devices' models differ and B how much their
samples do (Li et al., MLSys 2020, section 5.1); each device draws its own. Or a user's own ``FILE.npz`` with
``x`` (samples, features) and ``y`` (samples, whole numbers from 0).

Splits: *iid*; *dirichlet:A*, the part of a class that a device gets is drawn from Dirichlet(A) (Hsu et al.,
2019); *shards:K*, samples sorted by label and dealt in K runs a device (McMahan et al., 2017). Each sample
is one device's. A fifth of all samples is kept for the test, drawn before the split.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.errors import UserError

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]
TEST = 0.2
LEAST, LARGEST = 2, 500
"""Samples that a device has at least; and at most, of the synthetic family."""


@dataclass(frozen=True)
class Samples:
    """``x``: (samples, features). ``y``: (samples,) from 0 to ``classes`` - 1."""

    x: Floats
    y: Labels
    classes: int


@dataclass(frozen=True)
class Federation:
    """``parts``: of each device the numbers of its samples in ``train``."""

    name: str
    train: Samples
    test: Samples
    parts: list[Labels]


def federation(data: str, split: str, devices: int, random: np.random.Generator) -> Federation:
    """The samples of ``devices``.

    Raises:
        UserError: data or split is unknown, cannot be read, or too small for so many devices.
    """
    if devices < 1:
        raise UserError(f"`devices` {devices}; accepted are whole numbers from 1 up")
    kind, _, text = data.partition(":")
    if kind == "synthetic":
        alpha, beta = _numbers(data, text or "1,1", 2)
        return _synthetic(data, alpha, beta, devices, random)
    samples = _digits() if data == "digits" else _read(data)
    order = random.permutation(len(samples.y))
    cut = int(len(order) * (1 - TEST))
    train, test = (
        Samples(samples.x[part], samples.y[part], samples.classes) for part in (order[:cut], order[cut:])
    )
    if cut < devices * LEAST:
        raise UserError(f"`devices` {devices}: {data} has {cut} samples to train on, {LEAST} each are needed")
    return Federation(data, train, test, _split(split, train, devices, random))


def _digits() -> Samples:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError("`data` digits needs scikit-learn (pip install 'windtunnel[edge]')") from None
    digits = load_digits()
    return Samples(digits.data / 16.0, digits.target.astype(np.int64), 10)


def _read(name: str) -> Samples:
    path = Path(name)
    if path.suffix != ".npz":
        raise UserError(f"`data` {name!r}; accepted are digits, synthetic:A,B and a FILE.npz with x and y")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            x, y = np.asarray(arrays["x"], np.float64), np.asarray(arrays["y"])
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f"`data` {name}: {error}; accepted is a FILE.npz with arrays x and y") from None
    whole = y.ndim == 1 and np.issubdtype(y.dtype, np.integer) and len(y) and y.min() >= 0
    if x.ndim < 2 or len(x) != len(y) or not whole or not np.isfinite(x).all():
        raise UserError(
            f"`data` {name}: x {x.shape}, y {y.shape}; accepted are finite x of (samples, features) and "
            "whole numbers y from 0 of (samples,)"
        )
    return Samples(x.reshape(len(x), -1), y.astype(np.int64), int(y.max()) + 1)


def _split(split: str, train: Samples, devices: int, random: np.random.Generator) -> list[Labels]:
    kind, _, text = split.partition(":")
    if split == "iid":
        return [np.sort(part) for part in np.array_split(random.permutation(len(train.y)), devices)]
    if kind == "dirichlet":
        (alpha,) = _numbers(split, text, 1)
        return _dirichlet(train, devices, alpha, random)
    if kind == "shards":
        (each,) = _numbers(split, text, 1)
        runs = np.array_split(np.argsort(train.y, kind="stable"), devices * int(each))
        dealt = random.permutation(len(runs)).reshape(devices, -1)
        return [np.sort(np.concatenate([runs[run] for run in own])) for own in dealt]
    raise UserError(f"`split` {split!r}; accepted are iid, dirichlet:A and shards:K")


def _dirichlet(train: Samples, devices: int, alpha: float, random: np.random.Generator) -> list[Labels]:
    parts: list[list[int]] = [[] for _ in range(devices)]
    for label in range(train.classes):
        own = random.permutation(np.flatnonzero(train.y == label))
        edges = (np.cumsum(random.dirichlet(np.full(devices, alpha)))[:-1] * len(own)).astype(int)
        for part, more in zip(parts, np.split(own, edges), strict=True):
            part.extend(more.tolist())
    for part in parts:  # who got too little gets of who has most
        while len(part) < LEAST:
            part.append(max(parts, key=len).pop())
    return [np.sort(np.array(part, np.int64)) for part in parts]


def _synthetic(name: str, alpha: float, beta: float, devices: int, random: np.random.Generator) -> Federation:
    features, classes = 60, 10
    scale = np.arange(1, features + 1) ** -0.6  # a diagonal covariance of j ** -1.2
    sizes = np.minimum(random.lognormal(4, 2, devices).astype(int) + 50, LARGEST)
    xs, ys = [], []
    for size in sizes:
        mean = random.normal(random.normal(0, beta**0.5), 1, features)
        centre = random.normal(0, alpha**0.5)
        weights, bias = random.normal(centre, 1, (features, classes)), random.normal(centre, 1, classes)
        x = mean + scale * random.normal(size=(size, features))
        xs.append(x)
        ys.append(np.argmax(x @ weights + bias, axis=1))
    x, y, owner = (
        np.concatenate(xs),
        np.concatenate(ys).astype(np.int64),
        np.repeat(np.arange(devices), sizes),
    )
    tests = random.random(len(y)) < TEST
    train, test = (Samples(x[which], y[which], classes) for which in (~tests, tests))
    return Federation(name, train, test, [np.flatnonzero(owner[~tests] == place) for place in range(devices)])


def _numbers(what: str, text: str, count: int) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
        if len(numbers) != count or not all(0 < number < 1e6 for number in numbers):
            raise ValueError
    except ValueError:
        raise UserError(f"{what!r}: accepted are {count} positive numbers after the colon") from None
    return numbers
