"""Files of traces: JSON lines, first one header that is the same for all kinds, then one line for each entry.

The header says ``kind`` (what arrives: "agent-session", "failures"), ``version`` (of that kind's fields),
``source`` (where the trace comes from, in words) and ``licence``; a kind may add fields of its own. Reading
is strict: a field that is unknown, missing or of another type is refused in a sentence that names the file,
the line, the field, its value and what is accepted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from windtunnel.base import atomic
from windtunnel.base.errors import UserError

SURROGATE = re.compile("[\ud800-\udfff]")
KINDS = {
    str: "text",
    int: "a whole number",
    bool: "true or false",
    list: "a list of texts",
    dict: "a mapping of names to texts",
}
_REQUIRED = object()


@dataclass(frozen=True)
class TraceHeader:
    """What every trace says of itself. See the module for the fields."""

    kind: str
    version: int
    source: str
    licence: str


def write(
    path: Path, header: TraceHeader, own: Mapping[str, Any], entries: Iterable[Mapping[str, Any]]
) -> None:
    """Write the file whole or not at all. ``own``: the header's further fields.

    Raises:
        UserError: the file cannot be written.
    """
    text = "".join(_line(line) for line in ({**asdict(header), **own}, *entries))
    try:
        atomic.replace(path, text)
    except OSError as fault:
        raise UserError(f"{path}: the trace cannot be written: {fault.strerror}") from fault


def _line(fields: Mapping[str, Any]) -> str:
    text = json.dumps(fields, ensure_ascii=False)
    # an output with bytes that are no UTF-8 holds lone surrogates: those can only be written as escapes
    return (text if text.isascii() or not SURROGATE.search(text) else json.dumps(fields)) + "\n"


def read(path: Path, kind: str, version: int) -> tuple[TraceHeader, Fields, list[Fields]]:
    """The header, its further fields, and the entries of a trace of that kind and version.

    Raises:
        UserError: the file cannot be read, or is something else.
    """
    try:
        text = path.read_bytes().decode()
    except OSError as fault:
        raise UserError(f"{path}: the trace cannot be read: {fault.strerror}") from fault
    except UnicodeDecodeError as fault:
        raise UserError(
            f"{path}: the trace is not UTF-8 text: {fault.reason} at byte {fault.start}"
        ) from fault
    # JSON escapes line feeds, so only they end a line (splitlines would also split at U+2028 and others)
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise UserError(f"{path}: the file is empty; a trace starts with a header line")
    own = Fields(path, *lines[0])
    for name, expected in (("kind", kind), ("version", version)):
        value = own.take(name, type(expected))
        if value != expected:
            raise own.wrong(name, value, json.dumps(expected))
    header = TraceHeader(kind, version, own.take("source", str), own.take("licence", str))
    return header, own, [Fields(path, *line) for line in lines[1:]]


class Fields:
    """The fields of one line, taken one by one; what is left when it is `done` is unknown."""

    def __init__(self, path: Path, number: int, line: str) -> None:
        self._where = f"{path}, line {number}"
        try:
            fields = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as fault:
            raise UserError(f"{self._where}: not JSON: {fault}") from fault
        if not isinstance(fields, dict):
            raise UserError(f"{self._where}: {_short(fields)} is not a JSON object")
        self._fields: dict[str, Any] = fields

    def wrong(self, name: str, value: object, accepted: str) -> UserError:
        return UserError(f"{self._where}: field {name}: {_short(value)} is not accepted; use {accepted}")

    def take(self, name: str, kind: type, default: Any = _REQUIRED) -> Any:
        if name not in self._fields:
            if default is _REQUIRED:
                raise UserError(f"{self._where}: field {name} is missing; it holds {KINDS[kind]}")
            return default
        value = self._fields.pop(name)
        if type(value) is not kind:
            raise self.wrong(name, value, KINDS[kind])
        return value

    def number(self, name: str, default: float | None, *, least: float) -> float:
        """Seconds; None as default: they must be told."""
        value = self._fields.pop(name, default)
        if type(value) not in (int, float) or not least <= value <= 1e9:
            raise self.wrong(name, value, f"a number of seconds from {least:g} to 1e9")
        return float(value)

    def texts(self, name: str, default: tuple[str, ...]) -> tuple[str, ...]:
        values = self.take(name, list, list(default))
        if not all(isinstance(value, str) for value in values):
            raise self.wrong(name, values, KINDS[list])
        return tuple(values)

    def texts_by_name(self, name: str) -> dict[str, str]:
        values = self.take(name, dict, {})
        if not all(isinstance(value, str) for value in values.values()):
            raise self.wrong(name, values, KINDS[dict])
        return values

    def hosts(self, name: str, count: int) -> frozenset[int]:
        """Which of so many hosts, none by default."""
        values = self._fields.pop(name, [])
        if not isinstance(values, list) or not all(
            type(host) is int and 0 <= host < count for host in values
        ):
            raise self.wrong(name, values, f"a list of hosts from 0 to {count - 1}")
        return frozenset(values)

    def done(self) -> None:
        if self._fields:
            raise UserError(f"{self._where}: unknown field {', '.join(sorted(self._fields))}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
