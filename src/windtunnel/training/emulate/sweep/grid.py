"""The points of a grid: every combination of what is varied, as command lines.

What is varied is a list (``--tp: [1, 2, 4]``), or braces in text as a shell has them (``--tp {1,2,4}``,
``h100-sxm:{1,2}x8``).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from windtunnel.training.emulate.sweep.constraint import Value

_BRACES = re.compile(r"\{([^{}]*,[^{}]*)\}")
# Only where it is the whole value of an option: JSON and the like is left alone.
_OPTION_BRACES = re.compile(r"(?:^|(?<=\s))(--?[A-Za-z][\w-]*)[ =]\{([^{}'\":]*,[^{}'\":]*)\}(?=\s|$)")


def expand(text: str) -> list[str]:
    """``"a{1,2}{x,y}"`` is ``["a1x", "a1y", "a2x", "a2y"]``, as in a shell; braces do not nest."""
    match = _BRACES.search(text)
    if match is None:
        return [text]
    tails = expand(text[match.end() :])
    return [text[: match.start()] + choice.strip() + tail for choice in match[1].split(",") for tail in tails]


def split_arguments(text: str) -> tuple[list[str], dict[str, list[Value]]]:
    """The fixed arguments in ``text``, and what it varies: ``"--size 8b --tp {1,2}"`` is
    ``(["--size", "8b"], {"--tp": [1, 2]})``.

    Raises ValueError for quotes that do not close, and for an option varied twice.
    """
    varied: dict[str, list[Value]] = {}

    def take(match: re.Match[str]) -> str:
        if match[1] in varied:
            raise ValueError(f"it varies {match[1]} twice; accepted is once")
        varied[match[1]] = [typed(choice.strip()) for choice in match[2].split(",")]
        return " "

    return shlex.split(_OPTION_BRACES.sub(take, text)), varied


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
    found: dict[str, Value] = {}
    for position, word in enumerate(fixed):
        if not word.startswith("-") or isinstance(typed(word), int | float):
            continue
        option, equals, value = word.partition("=")
        following = fixed[position + 1] if position + 1 < len(fixed) else "-"
        if equals:
            found[name_of(option)] = typed(value)
        elif not following.startswith("-") or isinstance(typed(following), int | float):
            found[name_of(option)] = typed(following)
        else:
            found[name_of(option)] = True
    return found | {name_of(option): value for option, value in chosen.items()}


def name_of(option: str) -> str:
    """``--grad-accum`` is ``grad_accum``."""
    return option.lstrip("-").replace("-", "_")
