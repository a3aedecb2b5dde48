"""What a sweep remembers: one JSON file for each point that has ended, in ``<home>/sweeps/<id>/points/``.

A file is there whole or not at all, also after a power cut: it is written under another name, forced to the
disk, and renamed. So a sweep that was killed anywhere goes on with the points that have no file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from windtunnel.base import atomic
from windtunnel.base.errors import UserError

Row = dict[str, Any]


def sweep_folder(home: Path, sweep_id: str) -> Path:
    """The folder of a sweep, made if need be. Raises `UserError` where it cannot be made."""
    folder = home / "sweeps" / sweep_id
    try:
        (folder / "points").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: the folder of the sweep cannot be made ({error.strerror})") from error
    return folder


def write_row(folder: Path, row: Row) -> None:
    """Remember the outcome of the point ``row["point"]``."""
    path = folder / "points" / f"{row['point']:05d}.json"
    atomic.replace(path, json.dumps(row, indent=1) + "\n", durable=True)


def read_rows(folder: Path) -> dict[int, Row]:
    """The outcomes of all points that have ended, by point."""
    rows = [json.loads(path.read_text()) for path in sorted(folder.glob("points/*.json"))]
    return {row["point"]: row for row in rows}


def forget_rows(folder: Path) -> None:
    """Begin again: no point has ended."""
    for path in folder.glob("points/*.json"):
        path.unlink()
