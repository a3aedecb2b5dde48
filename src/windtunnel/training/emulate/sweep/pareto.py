"""The points that no other point beats: the Pareto front."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def pareto_front(values: ArrayLike) -> NDArray[np.bool_]:
    """Which rows of ``values`` (points x objectives, the smaller the better) are on the front.

    A row is on the front unless another one is at least as good in every objective and better in one; equal
    rows are on it together. Returns a mask, shape (points,). Rows with a NaN are not on it and beat nobody.
    """
    table = np.asarray(values, np.float64)
    known = np.array([not np.isnan(row).any() for row in table], np.bool_)
    front = known.copy()
    for row in np.flatnonzero(known):
        others = table[known]
        better = (others <= table[row]).all(axis=1) & (others < table[row]).any(axis=1)
        front[row] = not better.any()
    return front
