"""Profiles and plans as files: one JSON value each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from windtunnel.base import atomic
from windtunnel.base.errors import UserError
from windtunnel.base.plain import from_plain, to_plain
from windtunnel.training.gradsync.model import Plan, Profile

T = TypeVar("T", Profile, Plan)


def write(path: Path, one: Profile | Plan) -> None:
    """As one JSON file, whole or not at all."""
    atomic.replace(path, json.dumps(to_plain(one), indent=1, allow_nan=False) + "\n")


def read(path: Path, kind: type[T]) -> T:
    """The inverse of `write`.

    Raises:
        UserError: the file cannot be read, or is no such thing.
    """
    name = kind.__name__.lower()
    try:
        return from_plain(kind, json.loads(path.read_text()))
    except OSError as error:
        raise UserError(f"{name} {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(
            f"{name} {path}: {error}; a file written by windtunnel gradsync is accepted"
        ) from error
