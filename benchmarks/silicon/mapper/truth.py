"""What is counted and found, against loops that are run one by one and against every mapping there is."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from benchmarks.figures import figure
from benchmarks.harness.rows import Row
from tests.silicon.mapper.brute import exhaustive, random_case, random_tiny, simulate
from windtunnel.silicon.mapper.policy.counts import count
from windtunnel.silicon.mapper.policy.search import least_energy


def count_rows(quick: bool) -> Iterator[Row]:
    """Random nests: strides, loops of bound 1, any order and unrolling, levels that operands pass by."""
    rng, nests = np.random.default_rng(0), 200 if quick else 1000
    counts, wrong = 0, 0
    for _ in range(nests):
        case = random_case(rng)
        pairs = [*zip(count(*case), simulate(*case), strict=True)]
        counts, wrong = counts + len(pairs), wrong + sum(one != other for one, other in pairs)
    note = f"of {counts:,} counts of an operand at a level"
    yield figure("counts", f"{nests:,} random nests", "counts that differ", float(wrong), "0", note=note)


def optimum_rows(quick: bool) -> Iterator[Row]:
    """Tiny layers, of which all tilings and all orders can be tried."""
    rng, layers = np.random.default_rng(1), 30 if quick else 200
    wrong = none = 0
    for _ in range(layers):
        layer, accelerator, unroll = random_tiny(rng)
        found, truth = (
            least_energy(layer, accelerator, "", unroll).energy,
            exhaustive(layer, accelerator, unroll),
        )
        none += math.isinf(truth)
        wrong += not (found == truth or math.isclose(found, truth, rel_tol=1e-9))
    note = f"{none} of them fit in no way, which is told"
    yield figure("optimum", f"{layers} tiny layers", "optima that differ", float(wrong), "0", note=note)
