"""The file that describes a sweep, checked field by field (see docs/sweep.md), and the grid that it spans.

An error becomes one sentence: file, field, value, what is accepted. The points are every combination of
clusters (in whose names braces vary, as in a shell's: ``h100-sxm:{1,2}x8``) and of values of options
(``--tp: [1, 2, 4]``), as command lines, for which conditions hold.

A condition such as ``tp * pp <= world_size`` holds or does not hold. A spec may come from somebody else, so a
condition is no Python: simpleeval walks its syntax tree. It has no functions, no powers and no shifts.

A sweep's id is a hash of all that decides the results: the file's content, the script's, and the clusters as
they were resolved. A sweep whose id has been seen before goes on where it ended.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from windtunnel.base.errors import UserError
from windtunnel.base.fields import fitted
from windtunnel.base.options import OptionSpec, options, settled
from windtunnel.base.strict_yaml import read_mapping
from windtunnel.calibration import profiles
from windtunnel.cluster.load import load_cluster
from windtunnel.cluster.model import Cluster, Device
from windtunnel.store.database import versions
from windtunnel.training.emulate.options import ALONE, Options
from windtunnel.training.emulate.policy.search import parse_ranks
from windtunnel.training.emulate.program import Script
from windtunnel.training.emulate.twin.costs.profile import SHIPPED, find_profile
from windtunnel.training.emulate.twin.job import parse_slow
from windtunnel.training.emulate.twin.memory.config import AllocatorConfig

_BRACES = re.compile(r"\{([^{}]*,[^{}]*)\}")


def expand(text: str) -> list[str]:
    """``"a{1,2}{x,y}"`` is ``["a1x", "a1y", "a2x", "a2y"]``, as in a shell; braces do not nest."""
    match = _BRACES.search(text)
    if match is None:
        return [text]
    tails = expand(text[match.end() :])
    return [text[: match.start()] + choice.strip() + tail for choice in match[1].split(",") for tail in tails]


def typed(text: str) -> Value:
    """The number that ``text`` is, else the text itself."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def command_line(fixed: Sequence[str], chosen: Mapping[str, Value]) -> tuple[str, ...]:
    """The arguments of one point: true is a flag that is given, false one that is not."""
    arguments = list(fixed)
    for option, value in chosen.items():
        if isinstance(value, bool):
            arguments += [option] if value else []
        else:
            arguments += [option, str(value)]
    return tuple(arguments)


def argument_names(fixed: Sequence[str], chosen: Mapping[str, Value]) -> dict[str, Value]:
    """What a condition may call the arguments: ``--grad-accum 4`` is ``grad_accum``, which is 4."""
    named: dict[str, Value] = {}
    for position, word in enumerate(fixed):
        if not word.startswith("-") or isinstance(typed(word), int | float):
            continue
        option, equals, value = word.partition("=")
        following = fixed[position + 1] if position + 1 < len(fixed) else "-"
        if equals:
            named[name_of(option)] = typed(value)
        elif not following.startswith("-") or isinstance(typed(following), int | float):
            named[name_of(option)] = typed(following)
        else:
            named[name_of(option)] = True
    return named | {name_of(option): value for option, value in chosen.items()}


def name_of(option: str) -> str:
    """``--grad-accum`` is ``grad_accum``."""
    return option.lstrip("-").replace("-", "_")


Value = int | float | str | bool
"""What an argument can be: ``--tp 4``, ``--lr 3e-4``, ``--ac full``, or ``--compile``, given or not."""


def holds(condition: str, values: Mapping[str, Value]) -> bool:
    """Whether the condition holds where names have ``values``.

    Raises ValueError where it cannot be said: a name without a value, text compared with a number, a division
    by zero, something that is no part of an expression, a result that is neither true nor false.
    """
    import simpleeval  # only a sweep with conditions needs it

    long = ast.Pow, ast.LShift, ast.RShift  # of large numbers
    operators = {
        kind: function for kind, function in simpleeval.DEFAULT_OPERATORS.items() if kind not in long
    }
    evaluator = simpleeval.EvalWithCompoundTypes(operators=operators, names=dict(values))
    evaluator.functions = {}
    try:
        # simpleeval alone would take an assignment for its right side
        result = evaluator.eval(condition, ast.parse(condition.strip(), mode="eval").body)
    except simpleeval.NameNotDefined as error:
        raise ValueError(f"{error.name!r} is unknown, accepted are {', '.join(sorted(values))}") from None
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("it cannot be read, accepted is such as tp * pp <= 64") from None
    except (simpleeval.InvalidExpression, TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise ValueError(str(error).replace("\n", " ")) from None
    if not isinstance(result, bool):
        raise ValueError(f"it gives {result!r}; accepted is what is true or false, such as tp * pp <= 64")
    return result


def _some(value: object) -> object:
    """One value is short for a list of it; an empty list is refused."""
    if value is None or value in ([], ()):
        raise ValueError("accepted is a list of at least one value")
    return value if isinstance(value, list) else [value]


def _list(value: object) -> object:
    """One value is short for a list of it."""
    return [value] if isinstance(value, str) else value


def _words(value: object) -> object:
    """Arguments as text stay text; in a list, numbers are text too."""
    if isinstance(value, list) and not any(isinstance(item, bool | list | dict | None) for item in value):
        return [str(item) for item in value]
    return value


def _ranks(value: object) -> object:
    """One rank, or a list of them, as the text that ``--ranks`` takes."""
    several = value if isinstance(value, list) else [value]
    if several and all(isinstance(item, int) and not isinstance(item, bool) for item in several):
        return ",".join(str(item) for item in several)
    return value


Texts = Annotated[list[str], BeforeValidator(_some)]
Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _field(option: OptionSpec) -> tuple[Any, Any]:
    """An option of the emulations as a field of the file."""
    if option.kind == list[str]:
        return Annotated[list[str], BeforeValidator(_list)], list(option.default)
    kind = Literal[option.among] if option.among else option.kind
    limits: dict[str, Any] = {"ge": option.least, "le": option.most}
    if kind is float:
        limits["allow_inf_nan"] = False
    elif kind in (int, int | None):
        limits["strict"] = True
    before = [BeforeValidator(_ranks)] if option.name == "ranks" else []
    return Annotated[(kind, Field(**limits), *before)], option.default  # type: ignore[return-value]


SWEPT = [option for option in options(Options) if option.name not in ALONE]
FIELDS: dict[str, Any] = {option.name: _field(option) for option in SWEPT}
OptionsSpec = create_model("OptionsSpec", __config__=ConfigDict(extra="forbid"), **FIELDS)
"""As the options of ``windtunnel emulate``."""


class SweepSpec(BaseModel, extra="forbid"):
    name: str | None = None
    """a title; the file's name where it is left out"""
    script: str
    """the path of a script, from this file's folder"""
    args: Annotated[str | list[str], BeforeValidator(_words)] = ""
    """text, split as a shell does, or a list of words: arguments that all points have"""
    clusters: Texts
    """one or a list of names or YAML files, with what-ifs (`,nic=ib-200`) and braces"""
    grid: dict[str, Annotated[list[Value], BeforeValidator(_some)]] = {}
    """options and their values: numbers, words, true and false for flags"""
    where: Annotated[list[str], BeforeValidator(_list)] = []
    """one condition or a list of them; a point for which one does not hold is left out"""
    options: OptionsSpec = OptionsSpec()  # type: ignore[valid-type]
    """as in `windtunnel emulate`"""
    price_per_device_hour: Price | None = None
    """of clusters without a price of their own. Without prices cost is in device hours"""


ACCEPTED = {
    "name": "text",
    "script": "the path of a training script, from the file's own folder",
    "args": 'text such as "--size 8b --seq 8192", or a list of words',
    "clusters": "a list of cluster names such as h100-sxm:16x8, or of YAML files",
    "grid": "a mapping of options to lists, such as --tp: [1, 2, 4]",
    "grid.*": "a list of numbers, words, or true and false",
    "where": 'a list of conditions, such as ["tp * pp <= 64"]',
    "options": "a mapping of fields",
    "price_per_device_hour": "a number from 0 up",
} | {option.name: option.accepted for option in SWEPT}

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
    spec = fitted(SweepSpec, read_mapping(path, "sweep file"), str(path), ACCEPTED)
    folder = path.parent
    script = Script(folder / spec.script, ())
    try:
        script.check()
    except UserError as error:
        raise UserError(
            f"{path}: field script is {spec.script!r}, but {error}; paths start at the file's folder"
        ) from None
    fixed, clusters = _arguments(path, spec), _clusters(path, spec)
    size = len(clusters) * math.prod(map(len, spec.grid.values()))
    if size > MOST_POINTS:
        raise UserError(f"{path}: the grid has {size:,} points, accepted are at most {MOST_POINTS:,}")
    options = _options(path, spec.options, clusters)

    points: list[Point] = []
    for cluster, values in product(clusters, product(*spec.grid.values())):  # the last varies fastest
        chosen = dict(zip(spec.grid, values, strict=True))
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
    measured = [profiles.find(profile or cluster.host.device.name, SHIPPED) for cluster in clusters]
    content = {
        "spec": spec.model_dump(mode="json"),
        "script": hashlib.sha256(script.read_bytes()).hexdigest(),
        "clusters": [dataclasses.asdict(dataclasses.replace(cluster, name="")) for cluster in clusters],
        "profiles": [path and hashlib.sha256(path.read_bytes()).hexdigest() for path in measured],
        "versions": {
            name: version for name, version in versions().items() if name in ("windtunnel", "torch")
        },
    }
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
