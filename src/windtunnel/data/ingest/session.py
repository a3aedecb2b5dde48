"""Sessions: the file that users write, checked field by field.

    version: 1
    table: s3://lake/rm1                          # any URL of fsspec, or a path; a Parquet file or a folder
    storage: {anon: true}                         # options of the file system
    columns: [label, dense/7, sparse/3, crossed]  # what batches have: of the table, or made by transforms
    where: [[day, ">=", 20]]                      # rows must meet all of these
    transforms:
      - {kind: log, inputs: dense/7}              # in place, where there is no output
      - {kind: sigrid_hash, each: [sparse/3, sparse/4], rows: 100_000, seed: 7}
      - {kind: cross, inputs: [sparse/3, sparse/4], output: crossed, rows: 1_000_000}
    batch: 4096
    epochs: 2
    shuffle: true
    seed: 1

What kinds of transforms there are, and the settings of each, is in `transforms`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from windtunnel.base.errors import UserError
from windtunnel.base.fields import fitted, suggest
from windtunnel.base.strict_yaml import read_mapping
from windtunnel.data.ingest import transforms
from windtunnel.data.ingest.model import IngestSession, Transform

ACCEPTED = {
    "version": "1, the only one that this windtunnel reads",
    "table": "a path or a URL of fsspec, such as s3://bucket/table",
    "columns": "a list of names, 1 or more",
    "transforms": "a list of transforms, each a mapping with a kind",
    "kind": f"one of {', '.join(transforms.KINDS)}",
    "inputs": "a column's name, or a list of them",
    "each": "a list of columns, each of which is transformed by itself",
    "output": "a name",
    "where": "a list of conditions, each [column, operator, value]",
    "batch": "a whole number of rows from 1 up",
    "epochs": "a whole number from 1 up",
    "shuffle": "true or false",
    "seed": "a whole number from 0 up",
    "split_rows": "a whole number of rows from 1 up",
    "storage": "a mapping of options that fsspec takes",
    "drift": "refuse or fill",
}


def _names(value: object) -> object:
    return [value] if isinstance(value, str) else value


Name = Annotated[str, Field(min_length=1)]
Names = Annotated[tuple[Name, ...], BeforeValidator(_names)]
Positive = Annotated[int, Field(ge=1, strict=True)]


class TransformSpec(BaseModel, extra="allow"):
    """``kind``, ``inputs`` and ``output``, or ``each``; what else there is are the kind's own settings."""

    kind: Name
    inputs: Names | None = None
    each: Names | None = None
    output: Name | None = None


class SessionSpec(BaseModel, extra="forbid"):
    version: Literal[1]
    table: Name
    columns: Annotated[Names, Field(min_length=1)]
    transforms: tuple[TransformSpec, ...] = ()
    where: tuple[tuple[Name, Literal["==", "!=", "<", "<=", ">", ">=", "in", "not in"], Any], ...] = ()
    batch: Positive = 1024
    epochs: Positive = 1
    shuffle: bool = False
    seed: Annotated[int, Field(ge=0, strict=True)] = 0
    split_rows: Positive = 65_536
    storage: dict[str, Any] = {}
    drift: Literal["refuse", "fill"] = "refuse"


def read(path: Path) -> IngestSession:
    """The session in the file at ``path``. Raises `UserError` for the first thing that is wrong."""
    return check(read_mapping(path, "file of a session"), str(path))


def check(document: Any, where: str) -> IngestSession:
    """``document`` as a session; ``where`` is the file that errors name.

    Raises:
        UserError: the first thing in it that is wrong.
    """
    spec = fitted(SessionSpec, document, where, ACCEPTED)
    steps = [
        transform
        for place, transform_spec in enumerate(spec.transforms)
        for transform in _transforms(transform_spec, where, place)
    ]
    twice = sorted({name for name in spec.columns if spec.columns.count(name) > 1})
    if twice:
        raise UserError(f"{where}: field columns has {twice[0]} twice, accepted is each column once")
    conditions = []
    for place, (column, operator, value) in enumerate(spec.where):
        if (operator in ("in", "not in")) != isinstance(value, list):
            accepted = "a list with in and not in, one value with the others"
            raise UserError(
                f"{where}: field where.{place} has {value!r} with {operator}, accepted is {accepted}"
            )
        conditions.append((column, str(operator), tuple(value) if isinstance(value, list) else value))
    return IngestSession(
        spec.table, spec.columns, tuple(steps), tuple(conditions), spec.batch, spec.epochs, spec.shuffle,
        spec.seed, spec.split_rows, spec.storage, spec.drift,
    )  # fmt: skip


def _transforms(spec: TransformSpec, where: str, place: int) -> list[Transform]:
    at = f"field transforms.{place}"
    if spec.kind not in transforms.KINDS:
        raise UserError(f"{where}: {at}.kind is {spec.kind!r}{suggest(spec.kind, transforms.KINDS)}")
    if (spec.inputs is None) == (spec.each is None) or (spec.each is not None and spec.output):
        raise UserError(f"{where}: {at} accepts either inputs, with or without an output, or each")
    options = dict(spec.model_extra or {})
    kinds = [(column,) for column in spec.each] if spec.each is not None else [spec.inputs or ()]
    steps = [Transform(spec.kind, inputs, spec.output or inputs[0], options) for inputs in kinds if inputs]
    if not steps:
        raise UserError(f"{where}: {at} has no inputs, accepted is {ACCEPTED['inputs']}")
    for transform in steps:
        transforms.settings(transform, f"{where}: {at}")
    return steps
