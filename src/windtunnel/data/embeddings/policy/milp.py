"""The best plan for few tables, proven: a mixed-integer linear programme, solved by HiGHS.

The paper's programme (section 4.2) has a binary for each step of each table's curve. None is needed: given a
device's pieces, its fast memory is filled by a fractional knapsack, and its seconds are the largest, over all
prices v of a byte, of

    sum over its pieces of w(v)  -  v * capacity
    w(v) = slow  -  sum over the piece's segments of max(0, saves - v * bytes)

(duality of linear programmes). So only the placement is binary, and each price is one row a device. Few
prices matter: those of the plan so far, and then those of each solution, until none is slower than its rows
say. With fewer prices the programme bounds from below all the same.

Devices are alike: the k-th heaviest piece lies on one of the first k, which leaves out plans that differ only
in the numbers of devices.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array, hstack, kron, vstack

from windtunnel.data.embeddings.policy.pieces import (
    Floats,
    Ints,
    Pieces,
    largest,
    least_seconds,
    pooled,
    prices,
)

NODES = 60_000
"""Of branching in a pass: a limit of time would make other plans on a busy host."""
PASSES = 6
GAP = 1e-6
"""By which the best plan may be better, for rounding."""
LOOSE = 1.02
"""Times the best plan's seconds a solution may take: without any solution SciPy tells no bound."""


def improve(cut: Pieces, devices: int, begin: Ints) -> tuple[Ints, float]:
    """A plan as good as ``begin`` or better, and seconds that no plan of these pieces is below."""
    best, proven = begin, max(pooled(cut, devices), float(largest(cut).max()))
    score = float(least_seconds(cut, best, devices, cut.fast.capacity).max())
    density = cut.saves / cut.nbytes
    distinct_prices = np.unique(prices(cut, best, devices, cut.fast.capacity))
    middle = float(np.median(distinct_prices))
    grid = np.unique(np.concatenate([distinct_prices, middle * np.geomspace(0.25, 4, 17), [0.0]]))
    heavy = np.argsort(-_weights(cut, density, middle), kind="stable")
    for _ in range(PASSES):
        if score <= proven * (1 + GAP):
            break
        assignment, lower = _solve(cut, devices, grid, density, heavy, proven, score)
        proven = max(proven, lower)
        if assignment is None:
            break
        seconds = float(least_seconds(cut, assignment, devices, cut.fast.capacity).max())
        if seconds < score:
            best, score = assignment, seconds
        new = np.setdiff1d(prices(cut, assignment, devices, cut.fast.capacity), grid)
        if not len(new):
            break
        grid = np.union1d(grid, new)
    return best, proven


def _weights(cut: Pieces, density: Floats, price: float) -> Floats:
    gains = np.maximum(cut.saves - price * cut.nbytes, 0)
    weights: Floats = cut.slow - np.bincount(cut.piece, gains, len(cut))
    return weights


def _solve(
    cut: Pieces, devices: int, grid: Floats, density: Floats, heavy: Ints, lowest: float, highest: float
) -> tuple[Ints | None, float]:
    count, scale = len(cut), highest
    weights = np.array([_weights(cut, density, price) for price in grid]) / scale
    eye, empty = csr_array(np.eye(devices)), csr_array((count, 1))
    # the variables: p of device 0, of device 1, ..., and the seconds of the slowest device
    once = hstack([kron(np.ones((1, devices)), csr_array(np.eye(count))), empty])
    memory = hstack([kron(eye, cut.total[None, :] / cut.room), csr_array((devices, 1))])
    slower = hstack([kron(eye, weights), csr_array(-np.ones((devices * len(grid), 1)))])
    most = np.tile(grid * cut.fast.capacity / scale, devices)
    upper = np.ones((devices, count))
    for place, piece in enumerate(heavy[: devices - 1]):
        upper[place + 1 :, piece] = 0
    done = milp(
        np.append(np.zeros(devices * count), 1.0),
        integrality=np.append(np.ones(devices * count), 0),
        bounds=Bounds(np.append(np.zeros(devices * count), lowest / scale), np.append(upper.ravel(), LOOSE)),
        constraints=LinearConstraint(
            vstack([once, memory, slower], format="csr"),
            np.concatenate([np.ones(count), np.full(devices + len(most), -np.inf)]),
            np.concatenate([np.ones(count), np.ones(devices), most]),
        ),
        options={"node_limit": NODES, "mip_rel_gap": 0.0},
    )
    lower = 0.0 if done.mip_dual_bound is None else float(done.mip_dual_bound) * scale
    if done.x is None:
        return None, lower
    return done.x[:-1].reshape(devices, count).argmax(0), lower
