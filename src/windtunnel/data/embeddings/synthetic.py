"""Tables and lookups made up faithfully to what is published of production ones, by a seed.

- ``rm1``, ``rm2``, ``rm3``: the models of RecShard (ASPLOS 2022, section 6): the same 397 sparse features
  of dimension 64 in three hash sizes, 1.33, 2.66 and 5.32 billion rows in all (318, 635, 1,270 GB of
  float32). These totals are recalled from the paper and hold exactly here. How rows, pooling, coverage and
  skew spread over the features is inferred: rows and pooling are log-normal, pooling and coverage about the
  means of a production table of the same house (26.0 and 0.45; Zhao et al., ISCA 2022, RM1, recalled), nine
  in ten features follow Zipf's law with exponents from 0.6 to 1.2, the others are nearly flat.
- ``dlrm2021``: 856 tables whose reuse of rows in a batch of 65,536 is the published histogram of the data
  set dlrm_datasets, 2021 (887,017,990 lookups of 128,435,723 rows, 6.9 each). A mixture of flat and Zipf
  tables was fitted to it; the histogram does not tell single tables, so other mixtures fit as well.
- ``small``: 16 features like those of rm1, one million rows in all, for use on one machine.

A hash maps values to rows at random, so with as many values as rows 1/e of the rows are never used; rm2 and
rm3 have the values of rm1, and more of their rows are unused. ``shares`` are those of rows, after hashing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from windtunnel.base.errors import UserError
from windtunnel.base.fields import suggest
from windtunnel.data.embeddings.model import EmbeddingTable, Order, id_type

DIM = 64
FEATURES = 397
ROWS = {"rm1": 1_331_656_544, "rm2": 2_661_369_917, "rm3": 5_320_796_628}
"""Recalled; at 256 bytes a row they are the published 318, 635 and 1,270 GB."""
POOLING, COVERAGE = 26.0, 0.45
SAMPLES_2021 = 65_536
MIXTURE_2021 = (
    (9, 993, 0, 24.84),
    (1, 333, 0.4, 49.89),
    (26, 1003, 0.6, 60.16),
    (2, 1143, 0.6, 171.38),
    (350, 10026, 0, 4.01),
    (5, 9999, 0, 59.99),
    (3, 10728, 0, 160.91),
    (128, 9988, 0.4, 9.99),
    (26, 10084, 0.4, 25.21),
    (3, 9883, 0.6, 59.3),
    (10, 9802, 0.75, 58.81),
    (28, 99296, 0, 3.97),
    (2, 88441, 0.6, 132.66),
    (192, 99861, 1.05, 3.99),
    (11, 1031440, 0, 154.72),
    (41, 1008027, 0.4, 60.48),
    (18, 9995223, 0, 59.97),
    (1, 17077854, 0, 64.04),
)
"""Tables, rows of each, exponent of Zipf's law (0: flat), lookups of a sample: fitted by non-negative least
squares to the histogram, absolute errors over its 17 bins 0.001 in all."""
NAMES = (*ROWS, "dlrm2021", "small")


def tables(
    name: str, seed: int = 0, *, scale: float = 1.0, values: float = 1.0, coverage: float = COVERAGE
) -> tuple[EmbeddingTable, ...]:
    """The tables of a name in `NAMES`.

    ``scale``: of all numbers of rows. ``values``: distinct values of a feature over rows of its table, on
    average, at the sizes of rm1; ``coverage``: the mean over the features. The last two are of the rm models
    and ``small``; what dlrm2021 has is fitted.

    Raises:
        UserError: there are no such tables.
    """
    if name not in NAMES:
        raise UserError(f"synthetic tables {name!r} are unknown{suggest(name, NAMES)}")
    for field, value, high in (("scale", scale, 1e3), ("values", values, 1e3), ("coverage", coverage, 1.0)):
        if not 0 < value <= high:
            raise UserError(f"synthetic tables: {field} is {value!r}, accepted is more than 0 to {high:g}")
    rng = np.random.default_rng([seed, 15])
    if name == "dlrm2021":
        return _dlrm2021(rng, scale)
    count, total = (16, 1_000_000) if name == "small" else (FEATURES, ROWS[name])
    spread = rng.permutation(np.clip(ndtri((np.arange(count) + 0.5) / count), -2.4, 2.4))
    base = _sizes(spread, round((1_000_000 if name == "small" else ROWS["rm1"]) * scale))
    rows = _sizes(spread, round(total * scale))
    distinct = base * values * rng.lognormal(-0.125, 0.5, count)
    used = np.clip(np.round(-rows * np.expm1(-distinct / rows)), 1, rows).astype(np.int64)
    exponents = np.where(rng.random(count) < 0.9, rng.uniform(0.6, 1.2, count), rng.uniform(0.0, 0.3, count))
    pooling = rng.lognormal(0.0, 1.2, count)
    pooling = np.clip(pooling * POOLING / np.exp(0.72), 1.0, 200.0)
    shape = 0.6
    covered = np.clip(rng.beta(shape, shape * (1 / min(coverage, 0.999) - 1), count), 0.005, 1.0)
    drawn_tables = []
    for number in range(count):
        ranks, shares = zipf(int(rows[number]), float(exponents[number]), int(used[number]))
        drawn_tables.append(
            EmbeddingTable(
                f"f{number:03d}", int(rows[number]), DIM, pooling=float(pooling[number]),
                coverage=float(covered[number]), ranks=ranks, shares=shares,
            )
        )  # fmt: skip
    return tuple(drawn_tables)


def _sizes(spread: NDArray[np.float64], total: int) -> NDArray[np.int64]:
    """Log-normal numbers of rows, at least 16 each (less where ``total`` is small), ``total`` in all."""
    least = max(1, min(16, total // len(spread)))
    weights = np.exp(1.8 * spread)
    rows = least + np.floor(weights / weights.sum() * max(0, total - least * len(spread))).astype(np.int64)
    rows[np.argmax(rows)] += max(0, total - int(rows.sum()))
    return rows


def _dlrm2021(rng: np.random.Generator, scale: float) -> tuple[EmbeddingTable, ...]:
    drawn_tables: list[EmbeddingTable] = []
    for count, rows, exponent, lookups in MIXTURE_2021:
        size = max(1, round(rows * scale))
        ranks, shares = zipf(size, exponent)
        for covered in rng.uniform(0.25, 1.0, count):
            pooling = max(1.0, lookups / covered)
            drawn_tables.append(
                EmbeddingTable(
                    f"t{len(drawn_tables):03d}", size, DIM, pooling=pooling, coverage=lookups / pooling,
                    ranks=ranks, shares=shares,
                )
            )  # fmt: skip
    return tuple(drawn_tables)


def zipf(
    rows: int, exponent: float, used: int | None = None, points: int = 64
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """``ranks`` and ``shares`` of an `EmbeddingTable` of which ``used`` rows (default: all) are looked up by
    Zipf's law: rank r (from 1) by a share proportional to r to the minus ``exponent``. Flat with exponent
    0."""
    used = rows if used is None else used
    exact = np.arange(1, min(used, 4096) + 1, dtype=float)
    head = np.cumsum(exact**-exponent)
    knots = np.unique(np.round(np.geomspace(1, used, points)).astype(np.int64))

    def integral(at: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.log(at) if exponent == 1 else at ** (1 - exponent) / (1 - exponent)

    tail = np.maximum(knots, len(exact)) + 0.5  # the sum beyond the head, by the midpoint rule
    mass = head[np.minimum(knots, len(exact)) - 1] + integral(tail) - integral(np.array(len(exact) + 0.5))
    ranks, shares = [0, *knots.tolist()], [0.0, *(mass / mass[-1]).tolist()]
    return (*ranks, *([rows] if used < rows else [])), (*shares, *([1.0] if used < rows else []))


def order(rows: int, seed: int, *, day: int = 0, drift: float = 0.0) -> Order:
    """Which id has which rank: a permutation of the ids, uint32 where they fit.

    ``drift``: the share of all ranks, hot and cold alike, that change places among each other every day, so
    that of yesterday's hot rows about that share is no longer hot today. Days build on each other.
    """
    ranking = np.random.default_rng([seed, 0]).permutation(np.arange(rows, dtype=id_type(rows)))
    for passed in range(1, day + 1):
        rng = np.random.default_rng([seed, passed])
        moved = rng.choice(rows, round(rows * drift), replace=False)
        ranking[moved] = ranking[np.roll(moved, 1)]
    return ranking


def draw(
    table: EmbeddingTable, samples: int, rng: np.random.Generator, order: Order | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Lookups of ``samples`` samples: offsets (samples + 1) and the ranks asked for, or the ids where the
    ``order`` (ids by rank) is given.

    A sample has the feature with the probability ``coverage``; how many rows it then asks for is 1 plus a
    geometric number of mean ``pooling`` - 1. Ranks follow the curve exactly, alike between two of its points.
    """
    present = rng.random(samples) < table.coverage
    lengths = np.zeros(samples, np.int64)
    lengths[present] = rng.geometric(1 / max(table.pooling, 1.0), int(present.sum()))
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    ranks, shares = table.curve()
    rows = np.interp(rng.random(int(offsets[-1])), shares, ranks).astype(np.int64)
    np.minimum(rows, table.rows - 1, out=rows)
    return offsets, rows if order is None else order[rows].astype(np.int64)
