"""A small data set that needs no download: the ten digits in dots, drawn at random places."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROWS = (
    "0e11131519110e", "040c040404040e", "0e11010204081f", "1f02040201110e", "02060a121f0202",
    "1f101e0101110e", "0608101e11110e", "1f010204080808", "0e11110e11110e", "0e11110f01020c",
)  # fmt: skip
"""Of each digit seven rows of five dots, two hexadecimal digits each."""
FIELD = 9


def drawn(
    count: int, seed: int, *, scale: int = 1, noise: float = 0.2, strength: tuple[float, float] = (0.6, 1.2)
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Images, [count, 1, side, side] with a side of ``FIELD * scale``, and which digit each shows: of 7 by 5
    dots times ``scale``, of a strength between these two, over normal noise of that deviation."""
    rows = [[int(digit[at : at + 2], 16) for at in range(0, 14, 2)] for digit in ROWS]
    dots = np.array([[[row >> (4 - at) & 1 for at in range(5)] for row in digit] for digit in rows])
    large = dots.repeat(scale, 1).repeat(scale, 2).astype(np.float32)
    (height, width), side = large.shape[1:], FIELD * scale
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, count)
    images = noise * rng.standard_normal((count, 1, side, side)).astype(np.float32)
    places = rng.integers(0, (side - height + 1, side - width + 1), (count, 2))
    for image, (row, column), label in zip(images, places, labels, strict=True):
        image[0, row : row + height, column : column + width] += large[label] * rng.uniform(*strength)
    return images, labels
