"""From measured points to the figures of a profile."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def least_squares(columns: Sequence[NDArray[np.float64]], values: NDArray[np.float64]) -> list[float]:
    """Coefficients, none negative, that fit best relative to the values: columns that would need a negative
    one are left out, the most negative first."""
    scale = [float(np.max(np.abs(column))) or 1.0 for column in columns]
    weight = 1.0 / np.maximum(np.abs(values), 0.05 * float(np.max(np.abs(values))) + 1e-12)
    used = list(range(len(columns)))
    coefficients = [0.0] * len(columns)
    while used:
        matrix = np.column_stack([columns[place] / scale[place] * weight for place in used])
        solution = np.linalg.lstsq(matrix, values * weight, rcond=None)[0]
        worst = int(np.argmin(solution))
        if solution[worst] >= 0:
            for place, value in zip(used, solution, strict=True):
                coefficients[place] = float(value) / scale[place]
            break
        used.pop(worst)
    return coefficients


def quartile(values: Sequence[float]) -> float:
    """The lower quartile (the nearest value below)."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 4]
