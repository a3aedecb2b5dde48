"""From a sweep file to its points: what is emulated, on what, and under which id it is remembered.

The id is a hash of all that decides the results: the file's content, the script's, and the clusters as they
were resolved. A sweep whose id has been seen before goes on where it ended.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel

from windtunnel.base.errors import UserError
from windtunnel.base.options import settled
from windtunnel.cluster.load import load_cluster
from windtunnel.cluster.model import Cluster, Device
from windtunnel.store.database import versions
from windtunnel.training.emulate.options import Options
from windtunnel.training.emulate.policy.search import parse_ranks
from windtunnel.training.emulate.program import Script
from windtunnel.training.emulate.sweep.spec import (
    SweepSpec,
    Value,
    argument_names,
    combinations,
    command_line,
    expand,
    holds,
    name_of,
    read_spec,
)
from windtunnel.training.emulate.twin.costs.profile import find_profile
from windtunnel.training.emulate.twin.job import parse_slow
from windtunnel.training.emulate.twin.memory.config import AllocatorConfig

MOST_POINTS = 10_000


@dataclass(frozen=True)
class Point:
    """One emulation of a sweep. ``chosen``: what the grid set, by option."""

    index: int
    script: Script
    cluster: Cluster
    options: Options
    chosen: dict[str, Value] = field(hash=False)

    @property
    def capture_key(self) -> tuple[tuple[str, ...], int, int, Device]:
        """All of the point that a capture depends on: where this is equal, only the network differs."""
        cluster = self.cluster
        return self.script.arguments, cluster.world_size, cluster.devices_per_host, cluster.host.device


@dataclass(frozen=True)
class Sweep:
    """``left_out``: combinations for which a condition does not hold."""

    id: str
    name: str
    points: list[Point]
    left_out: int


def load_sweep(path: Path) -> Sweep:
    """Read a sweep file and lay out its points.

    Raises `UserError` with one sentence for anything in it that is wrong.
    """
    spec = read_spec(path)
    folder = path.parent
    script = Script(folder / spec.script, ())
    try:
        script.check()
    except UserError as error:
        raise UserError(
            f"{path}: field script is {spec.script!r}, but {error}; paths start at the file's folder"
        ) from None
    fixed, varied = _arguments(path, spec), dict(spec.grid)
    clusters = _clusters(path, spec)
    size = len(clusters) * math.prod(len(values) for values in varied.values())
    if size > MOST_POINTS:
        raise UserError(f"{path}: the grid has {size:,} points, accepted are at most {MOST_POINTS:,}")
    options = _options(path, spec.options, clusters)

    points: list[Point] = []
    for cluster in clusters:
        for chosen in combinations(varied):
            if _hold(path, spec.where, cluster, argument_names(fixed, chosen)):
                variant = Script(script.path, command_line(fixed, chosen))
                points.append(Point(len(points), variant, cluster, options, chosen))
    if not points:
        raise UserError(f"{path}: field where leaves none of the {size:,} points, accepted is one that does")
    name = spec.name or path.stem
    return Sweep(_id(spec, script.path, clusters, options.profile), name, points, size - len(points))


def _arguments(path: Path, spec: SweepSpec) -> list[str]:
    """The arguments that all points have."""
    try:
        fixed = list(spec.args) if isinstance(spec.args, list) else shlex.split(spec.args)
    except ValueError as error:
        raise UserError(
            f"{path}: field args is {spec.args!r}, {error}; accepted are words as in a shell"
        ) from None
    fixed_options = {word.partition("=")[0] for word in fixed if word.startswith("-")}
    for option, values in spec.grid.items():
        where = f"{path}: field grid.{option}"
        if not option.startswith("-") or not name_of(option).isidentifier():
            raise UserError(f"{where} is no option of a script, accepted is such as --tp")
        if option in fixed_options:
            raise UserError(f"{path}: option {option} is both fixed in args and varied, accepted is one")
        _once(where, [repr(value) for value in values])
    return fixed


def _once(what: str, values: Sequence[str]) -> None:
    for position, value in enumerate(values):
        if value in values[:position]:
            raise UserError(f"{what} has {value} twice, accepted is once")


def _clusters(path: Path, spec: SweepSpec) -> list[Cluster]:
    """The clusters, files found from the sweep's folder, with the sweep's price where they have none."""
    clusters = []
    names = [name for text in spec.clusters for name in expand(text)]
    _once(f"{path}: field clusters", names)
    for name in names:
        head = name.partition(",")[0].strip()
        here = "/" in head or head.endswith((".yaml", ".yml"))
        try:
            cluster = load_cluster(str(path.parent / name) if here else name)
        except UserError as error:
            raise UserError(f"{path}: field clusters: {error}") from None
        if cluster.price_per_device_hour is None:
            cluster = dataclasses.replace(cluster, price_per_device_hour=spec.price_per_device_hour)
        clusters.append(cluster)
    unpriced = [cluster.name for cluster in clusters if cluster.price_per_device_hour is None]
    if unpriced and len(unpriced) < len(clusters):
        raise UserError(
            f"{path}: cluster {unpriced[0]} has no price and another has one, accepted is "
            "price_per_device_hour for all of them or for none"
        )
    return clusters


def _options(path: Path, spec: BaseModel, clusters: Iterable[Cluster]) -> Options:
    """The options of every point; what depends on the cluster is checked on each."""
    options = Options(**settled(Options, spec.model_dump()))
    try:
        AllocatorConfig.parse(options.alloc_conf)
        if options.profile and find_profile(options.profile) is None:
            raise UserError(f"profile: there is no profile {options.profile!r}")
        for cluster in clusters:
            if options.ranks != "auto":
                parse_ranks(options.ranks, cluster.world_size)
            for text in options.slow:
                parse_slow(text, cluster)
    except UserError as error:
        raise UserError(f"{path}: field options: {error}") from None
    return options


def _hold(path: Path, conditions: Sequence[str], cluster: Cluster, arguments: dict[str, Value]) -> bool:
    """Whether all conditions of field ``where`` hold."""
    values: dict[str, Value] = arguments | {
        "cluster": cluster.name, "device": cluster.host.device.name, "hosts": cluster.hosts,
        "devices_per_host": cluster.devices_per_host, "world_size": cluster.world_size,
    }  # fmt: skip
    for condition in conditions:
        try:
            if not holds(condition, values):
                return False
        except ValueError as error:
            raise UserError(f"{path}: field where has {condition!r}: {error}") from None
    return True


def _id(spec: SweepSpec, script: Path, clusters: Sequence[Cluster], profile: str | None) -> str:
    """Twelve hexadecimal digits of all that decides the results of the points."""
    profiles = [find_profile(profile or cluster.host.device.name) for cluster in clusters]
    content = {
        "spec": spec.model_dump(mode="json"),
        "script": hashlib.sha256(script.read_bytes()).hexdigest(),
        "clusters": [dataclasses.asdict(dataclasses.replace(cluster, name="")) for cluster in clusters],
        "profiles": [None if entry is None else entry.provenance for entry in profiles],
        "versions": {
            name: version for name, version in versions().items() if name in ("windtunnel", "torch")
        },
    }
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
