"""Profiles: JSON files of what was measured on a machine, the user's own before those that are shipped.

A capability that calibrates has a module ``calibrate`` whose ``calibrate_here(quick, progress)`` returns a
`Calibrated`: ``windtunnel calibrate NAME`` calls it. What its profile means is its own affair.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from windtunnel.base import atomic, paths
from windtunnel.base.errors import UserError

T = TypeVar("T")
Progress = Callable[[str, float], None]
"""Called with the part that is measured and the fraction of it that is done."""


@dataclass(frozen=True)
class Calibrated:
    """What is told of a calibration: the file that it wrote, one sentence, and a table (of Rich) if it has
    one."""

    path: Path
    said: str
    table: Any = None


def own(name: str) -> Path:
    """Where this user's profile of that name lies or will lie."""
    return paths.profiles() / f"{name}.json"


def find(name: str, shipped: Path) -> Path | None:
    """The user's own profile of that name, else the one in the folder ``shipped``, else None."""
    files = (path for path in (own(name), shipped / f"{name}.json") if path.is_file())
    return next(files, None)


def read(path: Path, what: str, version: int, make: Callable[[dict[str, Any]], T]) -> T:
    """The profile that ``make`` makes of the content of ``path``; ``what``: such as "a device profile".

    Raises:
        UserError: the file is none, or of another version.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        written = content["version"]
        if written == version:
            return make(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path}: not {what} ({error}), accepted is a file that 'windtunnel calibrate' wrote"
        ) from error
    raise UserError(f"{path}: field version is {written}, accepted is {version}; calibrate again")


def save(
    path: Path, version: int, content: Mapping[str, Any], rows: tuple[str, Sequence[Any]] | None = None
) -> None:
    """Write a profile, whole or not at all. ``rows``: a further field and its list, one entry a line."""
    text = json.dumps({"version": version, **content}, indent=None if rows else 2)
    if rows is not None:
        lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows[1])
        text = f"{text[:-1]},\n{json.dumps(rows[0])}: [\n{lines}\n]}}"
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.replace(path, text + "\n")


def today() -> str:
    """The date of a measurement."""
    return datetime.now(UTC).strftime("%Y-%m-%d")
