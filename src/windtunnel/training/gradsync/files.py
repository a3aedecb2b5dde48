"""Profiles and plans as files: one JSON value each, with a digest of itself, so that one that was damaged or
changed by hand is refused as a whole."""

from __future__ import annotations

import hashlib
import json
import os
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TypeVar

from windtunnel.base import atomic
from windtunnel.base.errors import HostError, UserError
from windtunnel.base.plain import canonical, from_plain, to_plain
from windtunnel.training.gradsync.model import VERSION, SyncPlan, SyncProfile

PLAN, PROFILE, STEPS = "plan.json", "profile.json", "steps.json"
"""Where a plan and what it was made for lie beside each other; and what this package knows of codecs."""
T = TypeVar("T", SyncProfile, SyncPlan)
LARGEST = 1 << 28
"""Bytes of a file; a plan for a million gradients has fewer."""
DIGEST = "sha256"


@cache
def steps() -> dict[str, float]:
    """How many steps training needed to a loss with each codec, over those that it needed without: the worse
    of the jobs of ``python -m benchmarks training.gradsync --only steps``."""
    codecs = json.loads(resources.files(__package__).joinpath(STEPS).read_text())["codecs"]
    return {codec: max(mean for mean, _ in jobs.values()) for codec, jobs in codecs.items()}


def write(path: Path, value: SyncProfile | SyncPlan) -> None:
    """As one JSON file, whole or not at all.

    Raises:
        HostError: it cannot be written.
    """
    plain = to_plain(value)
    text = json.dumps({**plain, DIGEST: _digest(plain)}, indent=1, allow_nan=False)
    try:
        atomic.replace(path, text + "\n")
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
        UserError: the file cannot be read, or `write` did not write it so.
    """
    name = "plan" if kind is SyncPlan else "profile"
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST + 1)
        if len(text) > LARGEST:
            raise ValueError(f"it has more than {LARGEST >> 20} MiB")
        plain = json.loads(text)
        if plain.pop(DIGEST) != _digest(plain):
            raise ValueError("it was changed since it was written")
        if plain["version"] != VERSION:
            raise ValueError(f"its version is {plain['version']}, not {VERSION}")
        return from_plain(kind, plain)
    except OSError as error:
        raise UserError(f"{name} {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{name} {path}: {error!s:.200}; a file written by windtunnel gradsync is accepted"
        ) from error


def _digest(plain: object) -> str:
    return hashlib.sha256(canonical(plain)).hexdigest()
