"""Small models of many devices at once: stacked parameters in, stacked gradients out, all in NumPy.

A model is one flat vector of parameters, so that what a device sends is that vector. All functions take a
stack: parameters (devices, size), samples (devices, batch, features).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from windtunnel.base.errors import UserError
from windtunnel.edge.federated.data import Federation

Floats = NDArray[np.float64]
HIDDEN, CHANNELS, KERNEL = 64, 8, 3


@dataclass(frozen=True)
class LocalTraining:
    """What a device does in a round: ``epochs`` over its samples in batches by SGD. ``compute``: the seconds
    that this takes there."""

    epochs: int = 5
    batch: int = 10
    rate: float = 0.05
    compute: float = 0.0


DEFAULT = LocalTraining()


@dataclass(frozen=True)
class FederatedModel:
    """``shapes``: of the parameters, in the order of the vector. ``forward(weights, x)``: scores (devices,
    batch, classes), and a function from their gradient to those of the weights."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    forward: Callable[[list[Floats], Floats], tuple[Floats, Callable[[Floats], list[Floats]]]]

    @property
    def size(self) -> int:
        """Parameters."""
        return sum(int(np.prod(shape)) for shape in self.shapes)

    def initial(self, random: np.random.Generator) -> Floats:
        """(size,): weights by He's rule, biases zero."""
        parts = [
            random.normal(0, (2 / np.prod(shape[:-1])) ** 0.5, shape) if len(shape) > 1 else np.zeros(shape)
            for shape in self.shapes
        ]
        return np.concatenate([part.ravel() for part in parts])

    def weights(self, vectors: Floats) -> list[Floats]:
        """Views of ``vectors`` (devices, size) by shape."""
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes])
        parts = np.split(vectors, ends[:-1], axis=1)
        return [part.reshape(len(vectors), *shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def gradient(self, vectors: Floats, x: Floats, y: NDArray[np.int64], mask: Floats) -> Floats:
        """Of the mean cross-entropy of the samples that ``mask`` (devices, batch) counts, (devices, size)."""
        scores, backward = self.forward(self.weights(vectors), x)
        likely = np.exp(scores - scores.max(axis=2, keepdims=True))
        likely /= likely.sum(axis=2, keepdims=True)
        np.put_along_axis(likely, y[..., None], np.take_along_axis(likely, y[..., None], 2) - 1, 2)
        counted = np.maximum(mask.sum(axis=1), 1)[:, None]
        parts = backward(likely * (mask / counted)[..., None])
        return np.concatenate([part.reshape(len(vectors), -1) for part in parts], axis=1)

    def accuracy(self, vector: Floats, x: Floats, y: NDArray[np.int64]) -> float:
        """The part of the samples (samples, features) that one model takes for what they are."""
        scores, _ = self.forward(self.weights(vector[None]), x[None])
        return float((scores[0].argmax(axis=1) == y).mean())


def model(name: str, features: int, classes: int) -> FederatedModel:
    """Softmax regression, a perceptron with one hidden layer, or a small convolutional network on squares.

    Raises:
        UserError: there is no such model, or the features are no square.
    """
    if name == "softmax":
        return FederatedModel(name, ((features, classes), (classes,)), _softmax)
    if name == "mlp":
        return FederatedModel(name, ((features, HIDDEN), (HIDDEN,), (HIDDEN, classes), (classes,)), _mlp)
    if name == "cnn":
        side = round(features**0.5)
        if side * side != features or side < KERNEL:
            raise UserError(
                f"`model` cnn: {features} features are no square picture; accepted are softmax, mlp"
            )
        outputs = (side - KERNEL + 1) ** 2 * CHANNELS
        shapes = ((KERNEL * KERNEL, CHANNELS), (CHANNELS,), (outputs, classes), (classes,))
        return FederatedModel(name, shapes, _cnn)
    raise UserError(f"`model` {name!r}; accepted are softmax, mlp, cnn")


def train(
    model: FederatedModel, vectors: Floats, federation: Federation, members: NDArray[np.int64],
    training: LocalTraining = DEFAULT, *, random: np.random.Generator,
) -> Floats:  # fmt: skip
    """(members, size): each device's model after its epochs, from ``vectors``; all take their steps together,
    and who has fewer samples has empty steps."""
    vectors, samples = vectors.copy(), federation.train
    parts = [federation.parts[place] for place in members]
    most = max(len(part) for part in parts)
    for _ in range(training.epochs):
        order = np.full((len(parts), most), -1)
        for row, part in zip(order, parts, strict=True):
            row[: len(part)] = random.permutation(part)
        for first in range(0, most, training.batch):
            chosen = order[:, first : first + training.batch]
            mask = (chosen >= 0).astype(np.float64)
            vectors -= training.rate * model.gradient(vectors, samples.x[chosen], samples.y[chosen], mask)
    return vectors


def _dense(
    x: Floats, weight: Floats, bias: Floats
) -> tuple[Floats, Callable[[Floats], tuple[Floats, Floats, Floats]]]:
    def backward(above: Floats) -> tuple[Floats, Floats, Floats]:
        return above @ weight.swapaxes(1, 2), x.swapaxes(1, 2) @ above, above.sum(axis=1)

    return x @ weight + bias[:, None], backward


def _softmax(weights: list[Floats], x: Floats) -> tuple[Floats, Callable[[Floats], list[Floats]]]:
    scores, backward = _dense(x, *weights)
    return scores, lambda above: list(backward(above)[1:])


def _mlp(weights: list[Floats], x: Floats) -> tuple[Floats, Callable[[Floats], list[Floats]]]:
    hidden, first = _dense(x, *weights[:2])
    active = np.maximum(hidden, 0)
    scores, second = _dense(active, *weights[2:])

    def backward(above: Floats) -> list[Floats]:
        down, *upper = second(above)
        return [*first(down * (hidden > 0))[1:], *upper]

    return scores, backward


def _cnn(weights: list[Floats], x: Floats) -> tuple[Floats, Callable[[Floats], list[Floats]]]:
    devices, batch, features = x.shape
    side = round(features**0.5)
    windows = sliding_window_view(x.reshape(devices, batch, side, side), (KERNEL, KERNEL), axis=(2, 3))
    patches = windows.reshape(devices, -1, KERNEL * KERNEL)
    maps, first = _dense(patches, *weights[:2])
    active = np.maximum(maps, 0).reshape(devices, batch, -1)
    scores, second = _dense(active, *weights[2:])

    def backward(above: Floats) -> list[Floats]:
        down, *upper = second(above)
        return [*first(down.reshape(maps.shape) * (maps > 0))[1:], *upper]

    return scores, backward
