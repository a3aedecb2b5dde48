"""Profiles and plans as files: one JSON value each."""

from __future__ import annotations

import json
import os
from functools import cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from windtunnel.base import atomic
from windtunnel.base.errors import HostError, UserError
from windtunnel.base.plain import from_plain, to_plain
from windtunnel.training.gradsync.model import VERSION, Plan, Profile

PLAN, PROFILE, STEPS = "plan.json", "profile.json", "steps.json"
"""Where a plan and what it was made for lie beside each other; and what this package knows of codecs."""
T = TypeVar("T", Profile, Plan)
LARGEST = 1 << 28
"""Bytes of a file; a plan for a million gradients has fewer."""
RANKS = 1 << 20
"""At most, of a profile."""
MOST = 2**53
"""No number in a file is larger: beyond it sums of floats lose whole elements."""


@cache
def steps() -> dict[str, float]:
    """How many steps training needed to a loss with each codec, over those that it needed without: the worse
    of the jobs of ``python -m benchmarks training.gradsync --only steps``."""
    found = json.loads(resources.files(__package__).joinpath(STEPS).read_text())["codecs"]
    return {codec: max(mean for mean, _ in jobs.values()) for codec, jobs in found.items()}


def write(path: Path, one: Profile | Plan) -> None:
    """As one JSON file, whole or not at all.

    Raises:
        HostError: it cannot be written.
    """
    try:
        atomic.replace(path, json.dumps(to_plain(one), indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise HostError(f"{path} cannot be written: {error.strerror}") from error


def check_place(out: Path) -> None:
    """Before what is written there is made.

    Raises:
        UserError: nothing can be written there.
    """
    if out.is_dir() or not os.access(out.parent, os.W_OK):
        raise UserError(f"`out` {out}: a file in a folder that is there and may be written to is accepted")


def read(path: Path, kind: type[T]) -> T:
    """The inverse of `write`.

    Raises:
        UserError: the file cannot be read, or is no such thing.
    """
    name = kind.__name__.lower()
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST + 1)
        if len(text) > LARGEST:
            raise ValueError(f"it has more than {LARGEST >> 20} MiB")
        value = json.loads(text)
        _check_numbers(value)
        found = from_plain(kind, value)
        if wrong := _wrong(found):
            raise ValueError(wrong)
        return found
    except OSError as error:
        raise UserError(f"{name} {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(
            f"{name} {path}: {error!s:.200}; a file written by windtunnel gradsync is accepted"
        ) from error


def _check_numbers(value: Any) -> None:
    """All are counts, bytes, shares or seconds.

    Raises:
        ValueError: one is below zero, no number, or larger than any of these.
    """
    rest = [("it", value)]
    while rest:
        where, one = rest.pop()
        if isinstance(one, dict):
            rest += ((f"{where}.{name}", inner) for name, inner in one.items())
        elif isinstance(one, list):
            rest += ((where, inner) for inner in one)
        elif isinstance(one, int | float) and not 0 <= one <= MOST:
            raise ValueError(f"{where} is {one:.6g}; a number from 0 to 2**53 is accepted")


def _wrong(one: Profile | Plan) -> str:
    """What a file of the right fields cannot mean; "" where it can."""
    if one.version != VERSION:
        return f"version is {one.version}, not {VERSION}"
    hosts, ranks = (
        (one.hosts, one.world) if isinstance(one, Plan) else (one.network.hosts, one.network.ranks_per_host)
    )
    if min(hosts, ranks) < 1 or (isinstance(one, Plan) and ranks % hosts):
        return f"it is for {ranks} ranks on {hosts} hosts" if isinstance(one, Plan) else "hosts without ranks"
    if isinstance(one, Plan):
        lacks = not one.forecasts or not one.groups or not all(group.tensors for group in one.groups)
        return "it has no forecast, no group, or a group without gradients" if lacks else ""
    if one.network.world > RANKS:
        return f"it is for more than {RANKS} ranks"
    for cost in one.codecs:
        sizes = [0, *(point.numel for point in cost.points)]
        if len(sizes) < 2 or any(before >= after for before, after in pairwise(sizes)):
            return f"codecs: the sizes of {cost.codec} do not ascend"
    names = [tensor.name for tensor in one.tensors]
    return "two tensors have one name" if len(set(names)) < len(names) else ""
