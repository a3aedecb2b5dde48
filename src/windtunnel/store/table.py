"""The table of runs, and what goes into its columns."""

from __future__ import annotations

import math
import platform
import sys
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from sqlalchemy import JSON, DateTime, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from windtunnel.base.processes import Identity

Json = dict[str, Any]


class Base(DeclarativeBase):
    type_annotation_map = {Json: JSON(none_as_null=True), datetime: DateTime(timezone=True), str: Text}  # noqa: RUF012


class Row(Base):
    """One run. ``process`` is who executes it: host, boot, process id and when that process started."""

    __tablename__ = "runs"

    id: Mapped[str] = mapped_column(primary_key=True)
    capability: Mapped[str] = mapped_column(index=True)
    created_at: Mapped[datetime] = mapped_column(index=True)
    status: Mapped[str]
    inputs: Mapped[Json]
    seed: Mapped[int]
    versions: Mapped[Json]
    process: Mapped[Json]
    directory: Mapped[str]
    summary: Mapped[Json | None]
    wall_time_s: Mapped[float | None]
    error: Mapped[str | None]


def plain(value: Any) -> Any:
    """The value as JSON can hold it in every database: numbers that are not finite become null, arrays and
    tuples lists, paths and unknown objects text, keys text."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, list | tuple | set | frozenset | range):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    # Subclasses (enumerations of numbers or text) are reduced to what they are.
    for kind in (bool, int, str):
        if isinstance(value, kind):
            return kind(value)
    return None if value is None else str(value)


def versions() -> Json:
    """Versions of what a result depends on; packages that are not installed are left out."""
    found: Json = {"python": platform.python_version(), "platform": sys.platform}
    for package in ("windtunnel", "torch", "numpy", "numba"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def this_process() -> Json:
    own = Identity.own()
    return {"host": platform.node(), "boot": own.boot, "pid": own.pid, "started": own.started}


def is_gone(process: Json) -> bool:
    """Whether the process surely does not run any more. Of another host nothing can be said: False."""
    if process.get("host") != platform.node():
        return False
    return not Identity(process.get("pid", 0), process.get("started", 0), process.get("boot", "?")).lives()
