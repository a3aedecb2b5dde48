"""The file that describes a sweep, checked field by field: see docs/sweep.md.

An error becomes one sentence: file, field, value, what is accepted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from windtunnel.base.errors import UserError
from windtunnel.base.strict_yaml import StrictLoader
from windtunnel.cluster.schema import suggest
from windtunnel.training.emulate.sweep.grid import Value, expand, typed


def _some(value: object) -> object:
    """One value is short for a list of it; an empty list is refused."""
    if value is None or value in ([], ()):
        raise ValueError("accepted is a list of at least one value")
    return value if isinstance(value, list) else [value]


def _values(value: object) -> object:
    """Text may hold the list in braces: ``"{1,2}"`` is ``[1, 2]``."""
    return [typed(one) for one in expand(value)] if isinstance(value, str) else _some(value)


def _list(value: object) -> object:
    """One value is short for a list of it."""
    return [value] if isinstance(value, str) else value


def _words(value: object) -> object:
    """Arguments as text stay text; in a list, numbers are text too."""
    if isinstance(value, list) and not any(isinstance(one, bool | list | dict | None) for one in value):
        return [str(one) for one in value]
    return value


def _ranks(value: object) -> object:
    """One rank, or a list of them, as the text that ``--ranks`` takes."""
    several = value if isinstance(value, list) else [value]
    if several and all(isinstance(one, int) and not isinstance(one, bool) for one in several):
        return ",".join(str(one) for one in several)
    return value


Texts = Annotated[list[str], BeforeValidator(_some)]
Whole = Annotated[int, Field(strict=True)]
Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class OptionsSpec(_Strict):
    """As the options of ``windtunnel emulate``; ``reserve`` in MiB."""

    ranks: Annotated[str, BeforeValidator(_ranks)] = "auto"
    slow: Annotated[list[str], BeforeValidator(_list)] = []
    jitter: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Whole = 0
    alloc_conf: str = ""
    tokens: Annotated[Whole, Field(ge=0)] | None = None
    timeout: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 900.0
    reserve: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    profile: str | None = None


class SweepSpec(_Strict):
    name: str | None = None
    script: str
    args: Annotated[str | list[str], BeforeValidator(_words)] = ""
    clusters: Texts
    grid: dict[str, Annotated[list[Value], BeforeValidator(_values)]] = {}
    where: Annotated[list[str], BeforeValidator(_list)] = []
    options: OptionsSpec = OptionsSpec()
    price_per_device_hour: Price | dict[str, Price] | None = None


FIELDS: dict[tuple[str, ...], type[BaseModel]] = {(): SweepSpec, ("options",): OptionsSpec}
ACCEPTED = {
    "name": "text",
    "script": "the path of a training script, from the file's own folder",
    "args": 'text such as "--size 8b --tp {1,2}", or a list of words',
    "clusters": "a list of cluster names such as h100-sxm:16x8, or of YAML files",
    "grid": "a mapping of options to lists, such as --tp: [1, 2, 4]",
    "where": 'a list of conditions, such as ["tp * pp <= 64"]',
    "options": "a mapping of fields",
    "price_per_device_hour": "a number from 0 up, or a mapping of devices to such numbers",
    "ranks": "auto, all, or 0,17,120-127",
    "slow": "a list such as [host=3:1.3]",
    "jitter": "a number from 0 to 1",
    "seed": "a whole number",
    "alloc_conf": "text as in PYTORCH_CUDA_ALLOC_CONF",
    "tokens": "a whole number from 0 up",
    "timeout": "seconds, a number from 1 up",
    "reserve": "MiB, a number from 0 up",
    "profile": "the name of a measured profile",
}


def read_spec(path: Path) -> SweepSpec:
    """The sweep that the file describes. Raises `UserError` for the first thing in it that is wrong."""
    document = _read_yaml(path)
    if not isinstance(document, dict):
        raise UserError(f"{path}: a sweep file holds {document!r}, accepted is a mapping of fields")
    try:
        return SweepSpec.model_validate(document)
    except ValidationError as error:
        raise UserError(f"{path}: {_sentence(error)}") from None


def _sentence(error: ValidationError) -> str:
    """The first of Pydantic's errors in our words: field, value, what is accepted."""
    first = error.errors()[0]
    loc = tuple(str(part) for part in first["loc"] if part != "[key]")
    if first["type"] == "missing":
        return f"field {loc[-1]} is missing, accepted is {ACCEPTED[loc[-1]]}"
    if first["type"] == "extra_forbidden":
        return f"field {'.'.join(loc)} is unknown{suggest(loc[-1], FIELDS[loc[:-1]].model_fields)}"
    field = loc[:2] if loc[0] in ("options", "grid") else loc[:1]
    shown = f"field {'.'.join(field)} is {first['input']!r}"
    if first["type"] == "value_error":
        return f"{shown}, {first['ctx']['error']}"
    if field[0] == "grid" and len(field) == 2:
        return f"{shown}, accepted is a list of numbers, words, or true and false"
    return f"{shown}, accepted is {ACCEPTED[field[-1]]}"


def _read_yaml(path: Path) -> Any:
    try:
        return yaml.load(path.read_text(encoding="utf-8"), StrictLoader)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file, accepted is a sweep file (YAML)") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(
            f"{path}: cannot be read ({reason}), accepted is a readable sweep file (YAML)"
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        at = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{path}{at}: not valid YAML ({error.problem}), accepted is a sweep file") from None
    except yaml.YAMLError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: not valid YAML ({reason}), accepted is a sweep file") from None
