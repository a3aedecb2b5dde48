"""A row of the comparison: what was measured in this run, emulated or published, and if a target is met."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One figure.

    ``error``: abs(emulated - measured) / measured, or against ``published`` where nothing was measured.
    ``target``: in words, and ``met``: whether this run met it; None where there is none. ``note``: why a
    figure is missing, or what to know of it.
    """

    section: str
    name: str
    unit: str
    measured: float | None = None
    emulated: float | None = None
    published: float | None = None
    source: str = ""
    target: str = ""
    met: bool | None = None
    note: str = ""

    @property
    def error(self) -> float | None:
        truth = self.measured if self.measured is not None else self.published
        if self.emulated is None or truth is None:
            return None
        if truth == 0:
            return 0.0 if self.emulated == 0 else None
        return abs(self.emulated - truth) / abs(truth)

    def plain(self) -> dict[str, Any]:
        """The row as values of JSON."""
        return {**asdict(self), "error": self.error}


def left_out(section: str, name: str, why: str) -> Row:
    """A row that says why there is no figure."""
    return Row(section, name, "", note=why)


def guarded(section: str, produce: Callable[[], Iterable[Row]]) -> list[Row]:
    """The rows that ``produce`` yields; where it fails, those before the failure and one that tells it."""
    rows: list[Row] = []
    try:
        for row in produce():
            rows.append(row)
    except Exception as error:  # whatever it is, the other sections go on
        reason = f"{type(error).__name__}: {error}"
        rows.append(left_out(section, f"{section} (failed)", reason.splitlines()[0]))
    return rows
