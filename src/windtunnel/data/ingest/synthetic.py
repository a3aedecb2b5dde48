"""Tables of samples as recommendation models have them, and the sessions that read them, drawn from a seed.

How many features there are, how many samples have one, how long lists are, and what part of them a job
reads is that of the models RM1 to RM3 of Zhao et al. (ISCA 2022), with a part of the features. A feature
has the same name, such as ``sparse/3``, whether it lies in a map of all (as the samples are logged) or in a
column of its own: a session reads either table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from windtunnel.base.atomic import replacing
from windtunnel.base.errors import UserError
from windtunnel.base.fields import suggest
from windtunnel.data.ingest.model import IngestSession, Transform

KINDS = {"dense": pa.float32(), "sparse": pa.list_(pa.int64())}


@dataclass(frozen=True)
class PublishedModel:
    """Published, of a table and the jobs that read it. ``dense``, ``sparse``: features stored; ``coverage``:
    the share of samples that have one; ``length``: ids of a list; ``used`` and ``used_bytes``: the share of
    the features, and of the stored bytes, that a job reads; ``popular``: the share of bytes that serves 80 %
    of reads. Ours: ``skew``, the exponent by which some features are wanted by more jobs than others, fitted
    to ``popular`` (RM3's 40 jobs come to 0.38: it has four sparse features here); ``scale``: of so many
    features one is here."""

    dense: int
    sparse: int
    coverage: float
    length: float
    used: float
    used_bytes: float
    popular: float
    skew: float
    scale: int


MODELS = {
    "rm1": PublishedModel(12_115, 1_763, 0.45, 26.0, 0.11, 0.37, 0.39, 2.0, 100),
    "rm2": PublishedModel(12_596, 1_817, 0.41, 25.6, 0.10, 0.34, 0.37, 2.0, 100),
    "rm3": PublishedModel(5_707, 188, 0.29, 19.6, 0.09, 0.21, 0.18, 2.0, 40),
}


@dataclass(frozen=True)
class Feature:
    """``length``: ids of its list on average, 0 for one number; ``popularity``: how likely jobs want it, as a
    weight."""

    name: str
    coverage: float
    length: float
    popularity: float

    @property
    def nbytes(self) -> float:
        """Of an average sample, before they are compressed."""
        return self.coverage * (8 * self.length or 4)


def features(name: str, seed: int = 0) -> tuple[Feature, ...]:
    """Of the model ``name``: first dense ones, then sparse ones. Coverages and lengths differ by feature
    (beta and log-normal), with the published means.

    Raises:
        UserError: there is no such model.
    """
    if name not in MODELS:
        raise UserError(f"`name` {name!r} is no model{suggest(name, MODELS)}")
    model = MODELS[name]
    rng = np.random.default_rng((seed, 1))
    drawn_features = []
    for kind, count in (("dense", model.dense // model.scale), ("sparse", model.sparse // model.scale)):
        coverages = rng.beta(2 * model.coverage, 2 * (1 - model.coverage), count)
        coverages = np.clip(coverages * model.coverage / coverages.mean(), 0.01, 1)
        lengths = rng.lognormal(0, 0.7, count)
        lengths *= model.length / lengths.mean() if kind == "sparse" else 0
        ranks = rng.permutation(count) + 1.0
        for place in range(count):
            drawn_features.append(
                Feature(
                    f"{kind}/{place}", float(coverages[place]), float(lengths[place]),
                    float(ranks[place] ** -model.skew),
                )
            )  # fmt: skip
    return tuple(drawn_features)


def drawn(drawn_features: Sequence[Feature], rows: int, rng: np.random.Generator, *, maps: bool) -> pa.Table:
    """``rows`` samples: ``label``, ``day`` (ascending, 0 to 9), then the features, in two maps ``dense`` and
    ``sparse``, or each in a column of its own."""
    columns = {
        "label": pa.array((rng.random(rows) < 0.1).astype(np.int8)),
        "day": pa.array((np.arange(rows) * 10 // max(rows, 1)).astype(np.int32)),
    }
    generated = {feature.name: _values(feature, rows, rng) for feature in drawn_features}
    if not maps:
        return pa.table(columns | generated)
    for kind in KINDS:
        columns[kind] = _as_map(
            [(name, array) for name, array in generated.items() if name.startswith(f"{kind}/")], kind
        )
    return pa.table(columns)


def write(
    folder: Path,
    name: str,
    rows: int,
    *,
    maps: bool = True,
    files: int = 1,
    group_rows: int = 4096,
    seed: int = 0,
) -> None:
    """A table of the model ``name`` in ``folder``, which is made: ``files`` files, ``rows`` in all, with
    Zstandard. With the same seed a table of maps and one of columns have the same samples."""
    folder.mkdir(parents=True, exist_ok=True)
    table_features = features(name, seed)
    for number in range(files):
        count = rows * (number + 1) // files - rows * number // files
        part_table = drawn(table_features, count, np.random.default_rng((seed, 2, number)), maps=maps)
        with replacing(folder / f"part-{number:05}.parquet") as part:
            pq.write_table(part_table, part, row_group_size=group_rows, compression="zstd")


def sessions(table: str, name: str, count: int, seed: int = 0) -> tuple[IngestSession, ...]:
    """``count`` jobs that read a table of the model ``name``: each its own features, drawn by popularity
    until it has the published share of bytes (sparse ones first) and of features, and transforms of all three
    kinds: new features from others, sparse and dense ones."""
    model, table_features = MODELS[name], features(name, seed)
    total = sum(feature.nbytes for feature in table_features)
    drawn_sessions = []
    for number in range(count):
        rng = np.random.default_rng((seed, 3, number))
        sparse, dense = (
            [feature for feature in table_features if feature.name.startswith(f"{kind}/")]
            for kind in ("sparse", "dense")
        )
        chosen: list[Feature] = []
        for candidate in _by_popularity(sparse, rng):
            if (
                chosen
                and (sum(each.nbytes for each in chosen) + candidate.nbytes / 2) / total > model.used_bytes
            ):
                break
            chosen.append(candidate)
        rest = max(1, round(model.used * len(table_features)) - len(chosen))
        lists, numbers = (
            [feature.name for feature in chosen],
            [feature.name for feature in _by_popularity(dense, rng)[:rest]],
        )
        transforms = [Transform("log", (each,), each) for each in numbers]
        transforms += [Transform("clip", (each,), each, {"low": 0.0, "high": 5.0}) for each in numbers]
        transforms += [Transform("fill", (each,), each) for each in lists]
        transforms += [Transform("ngram", (lists[0],), "pairs", {"n": 2, "rows": 1_000_000})]
        transforms += [Transform("first", (each,), each, {"n": 50}) for each in lists]
        transforms += [
            Transform("sigrid_hash", (each,), each, {"rows": 1_000_000, "seed": seed}) for each in lists
        ]
        drawn_sessions.append(
            IngestSession(table, ("label", *numbers, *lists, "pairs"), tuple(transforms), seed=seed)
        )
    return tuple(drawn_sessions)


def _by_popularity(candidates: Sequence[Feature], rng: np.random.Generator) -> list[Feature]:
    weights = np.array([feature.popularity for feature in candidates])
    ranks = rng.choice(len(candidates), len(candidates), replace=False, p=weights / weights.sum())
    return [candidates[place] for place in ranks]


def _values(feature: Feature, rows: int, rng: np.random.Generator) -> pa.Array:
    """Null in the samples that do not have it. Ids are Zipf's, exponent 1.05, below a million."""
    has = rng.random(rows) < feature.coverage
    if not feature.length:
        return pa.array(rng.lognormal(0, 1, rows).astype(np.float32), mask=~has)
    lengths: NDArray[np.int64] = np.where(has, rng.geometric(1 / max(1.0, feature.length), rows), 0)
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    uniform = rng.random(int(ends[-1]))
    ids = (1_000_001 ** (-0.05) + uniform * (1 - 1_000_001 ** (-0.05))) ** (-1 / 0.05) - 1
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(ids.astype(np.int64)), mask=pa.array(~has))


def _as_map(columns: Sequence[tuple[str, pa.Array]], kind: str) -> pa.MapArray:
    """Of each sample the features that it has, by their number."""
    rows = len(columns[0][1])
    has = np.stack([np.asarray(column.is_valid()) for _, column in columns], axis=1)
    row, place = np.nonzero(has)
    keys = np.array([int(name.split("/")[1]) for name, _ in columns], np.int32)[place]
    items = pa.concat_arrays([column for _, column in columns]).take(pa.array(place * rows + row))
    ends = np.concatenate([[0], np.cumsum(has.sum(axis=1))]).astype(np.int32)
    return pa.MapArray.from_arrays(pa.array(ends), pa.array(keys), items.cast(KINDS[kind]))
