"""What ``python -m benchmarks`` shows of any capability: rows of figures, made section by section.

Every figure is measured in this run or marked as published with its source; a target that is missed is shown
as missed, and a section that fails says why and does not lose the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from windtunnel.base.errors import UserError


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


def published(module: str) -> dict[str, Any]:
    """What ``published.json`` beside a module (its ``__file__``) holds: figures of others, with their source,
    and what came of a re-run that is finished."""
    figures: dict[str, Any] = json.loads(Path(module).with_name("published.json").read_text())
    return figures


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


def runner(
    package: str, sections: Mapping[str, str], *, missing: str = "", timed: Sequence[str] = (),
    traced: Sequence[str] = (),
) -> Callable[..., list[Row]]:  # fmt: skip
    """The bench of ``package``: what ``python -m benchmarks`` calls.

    ``sections``: of each section "module.function" in ``package``, imported when it runs, so that one does
    not pay for what another needs; the function takes ``quick`` (of ``timed`` sections also ``minutes``, of
    ``traced`` ones the ``trace``) and yields rows. ``missing``: such a function without arguments that says
    why nothing can be measured here, or "".
    """

    def named(place: str) -> Callable[..., Any]:
        module, function = place.rsplit(".", 1)
        found: Callable[..., Any] = getattr(import_module(f"{package}.{module}"), function)
        return found

    def produce(name: str, quick: bool, minutes: float | None, trace: Path | None) -> Iterable[Row]:
        if missing and (why := named(missing)()):
            return [left_out(name, name, why)]
        given = (quick, *([minutes] if name in timed else []), *([trace] if name in traced else []))
        rows: Iterable[Row] = named(sections[name])(*given)
        return rows

    def run(
        wanted: Sequence[str] = (),
        *,
        quick: bool = False,
        minutes: float | None = None,
        trace: Path | None = None,
        progress: Callable[[str, float], None] | None = None,
        shown: Callable[[list[Row]], None] | None = None,
    ) -> list[Row]:
        """The rows of the ``wanted`` sections (default: all), in the order of the table.

        ``quick``: fewer repeats, and nothing that is large. ``minutes``: of the sections that go on for a
        time (None: their own). ``trace``: a file for the sections that hold a published trace against
        policies. ``progress`` is called with the section that begins, and the part of them that is done;
        ``shown`` with the rows of each section once it is done.

        Raises:
            UserError: a section that there is not, or ``minutes`` or a ``trace`` where none takes them.
        """
        for name in wanted:
            if name not in sections:
                raise UserError(f"bench: --only {name!r} is no section; accepted are {', '.join(sections)}")
        chosen = [name for name in sections if not wanted or name in wanted]
        if minutes is not None and not set(chosen) & set(timed):
            raise UserError(
                f"bench: --minutes {minutes:g} is of no section that runs here; accepted with"
                f" {', '.join(timed) or 'none of this bench'}"
            )
        if trace is not None and not set(chosen) & set(traced):
            raise UserError(
                f"bench: --trace {trace} is of no section that runs here; accepted with"
                f" {', '.join(traced) or 'none of this bench'}"
            )
        rows: list[Row] = []
        for place, name in enumerate(chosen):
            if progress is not None:
                progress(name, place / len(chosen))
            found = guarded(name, partial(produce, name, quick, minutes, trace))
            if shown is not None:
                shown(found)
            rows += found
        return rows

    return run
