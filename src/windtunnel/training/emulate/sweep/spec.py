"""The file that describes a sweep, checked field by field (see docs/sweep.md), and the grid that it spans.

An error becomes one sentence: file, field, value, what is accepted. The points are every combination of
clusters (in whose names braces vary, as in a shell's: ``h100-sxm:{1,2}x8``) and of values of options
(``--tp: [1, 2, 4]``), as command lines, for which conditions hold.

A condition such as ``tp * pp <= world_size`` holds or does not hold. A spec may come from somebody else, so a
condition is no Python: simpleeval walks its syntax tree. It has no functions, no powers and no shifts.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from windtunnel.base.fields import fitted
from windtunnel.base.options import OptionSpec, options
from windtunnel.base.strict_yaml import read_mapping
from windtunnel.training.emulate.options import ALONE, Options

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


def combinations(varied: Mapping[str, Sequence[Value]]) -> Iterator[dict[str, Value]]:
    """Every combination of the values, the last option varying fastest."""
    for values in product(*varied.values()):
        yield dict(zip(varied, values, strict=True))


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
        result = evaluator.eval(condition.strip())
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
Whole = Annotated[int, Field(strict=True)]
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
} | {option.name: option.words for option in SWEPT}


def read_spec(path: Path) -> SweepSpec:
    """The sweep that the file describes. Raises `UserError` for the first thing in it that is wrong."""
    return fitted(SweepSpec, read_mapping(path, "sweep file"), str(path), ACCEPTED)
