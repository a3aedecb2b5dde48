"""The scenario that a user writes, checked field by field: a cluster, and the jobs on it.

    cluster: v100:8x8,nic=ethernet-25     # as `--cluster` takes it
    placement: shared                     # packed, spread, shared
    iterations: 10                        # of the slowest job
    jobs:
      vision: {script: ../train_resnet.py, args: [--size, 50], devices: 16, weight: 2}
      again:  {run: last}                 # a run of `windtunnel emulate`
      theirs: {chakra: traces/moe}        # a folder of Chakra files, one a rank
      sums:   {training: {layers: 24, bytes: 1 GB, seconds: 0.2}, devices: 16}
      sort:   {mapreduce: {bytes: 200 MB, seconds: 0.1}, devices: 8}

Paths are from the file's folder. An error is one sentence: file, field, value, what is accepted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from windtunnel.base.errors import UserError
from windtunnel.base.fields import fitted
from windtunnel.base.strict_yaml import read_mapping
from windtunnel.cluster.schema import Bytes, Count, Seconds

KINDS = ("script", "run", "chakra", "training", "mapreduce")
ACCEPTED = {
    "cluster": "a cluster, such as v100:8x8,nic=ethernet-25",
    "placement": "packed, spread or shared",
    "iterations": "a whole number from 2 to 10,000",
    "jobs": "a mapping of names to jobs",
    "weight": "a number greater than 0",
    "flows": "a number greater than 0",
    "devices": "a whole number from 1",
    "layers": "a whole number from 1 to 1,000",
    "seed": "a whole number from 0",
    "bytes": "a quantity, such as 1 GB",
    "seconds": "a quantity, such as 50 ms",
}
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class TrainingSpec(BaseModel, extra="forbid"):
    layers: Annotated[Count, Field(le=1000)] = 16
    """layers, each with an all_reduce during backward"""
    bytes: Bytes
    """gradients of all layers"""
    seconds: Seconds
    """of computing in an iteration"""


class MapReduce(BaseModel, extra="forbid"):
    bytes: Bytes
    """that each device sends in the shuffle"""
    seconds: Seconds
    """of computing, half before and half after the shuffle"""


class ScenarioJobSpec(BaseModel, extra="forbid"):
    """One of `KINDS`."""

    script: str | None = None
    """a training script, emulated at once"""
    args: list[str | int | float] = []
    """its arguments"""
    run: str | None = None
    """a run of `windtunnel emulate`, by its id or `last`; its `graph/job.json` is read"""
    chakra: str | None = None
    """a folder with one MLCommons Chakra trace for each rank (`NAME.RANK.et`), groups in `comm_group.json`"""
    training: TrainingSpec | None = None
    """a generated data-parallel training job"""
    mapreduce: MapReduce | None = None
    """a generated MapReduce"""
    devices: Count | None = None
    """devices of the job"""
    weight: Positive = 1.0
    """its share of bandwidth under `--sharing aq`"""
    flows: Positive = 1.0
    """flows that carry each message, for `--sharing fifo`"""

    @property
    def kind(self) -> str:
        return next(kind for kind in KINDS if getattr(self, kind) is not None)


class ScenarioSpec(BaseModel, extra="forbid"):
    cluster: str
    """a name or a YAML file"""
    placement: Literal["packed", "spread", "shared"] = "packed"
    """`shared`: the jobs share all hosts; `packed`: a job after the other; `spread`: hosts far apart"""
    iterations: Annotated[Count, Field(ge=2, le=10_000)] = 10
    """of the slowest job; the others repeat theirs meanwhile"""
    seed: Annotated[int, Field(ge=0)] = 0
    """of what is drawn"""
    jobs: Annotated[dict[str, ScenarioJobSpec], Field(min_length=1)]
    """jobs by name"""


def read_spec(path: Path) -> ScenarioSpec:
    """The scenario at ``path``.

    Raises:
        UserError: the first thing in it that is wrong.
    """
    spec = fitted(ScenarioSpec, read_mapping(path, "scenario"), str(path), ACCEPTED)
    for name, job in spec.jobs.items():
        kinds = [kind for kind in KINDS if getattr(job, kind) is not None]
        field = f"{path}: jobs.{name}"
        if not name.replace("-", "").replace("_", "").isalnum():
            raise UserError(f"{field}: accepted are names of letters, digits, - and _")
        if len(kinds) != 1:
            has = " and ".join(kinds) or "no kind"
            raise UserError(f"{field} has {has}, accepted is one of {', '.join(KINDS)}")
        if job.devices is None and kinds[0] in ("script", "training", "mapreduce"):
            raise UserError(f"{field}: field devices is missing, accepted is {ACCEPTED['devices']}")
        if job.args and kinds[0] != "script":
            raise UserError(f"{field}: field args is {job.args}, accepted is that with a script")
    return spec
