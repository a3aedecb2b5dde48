"""The event log of a run: JSON lines that the supervisor alone writes.

Every line is one write to the file, so that a supervisor that is killed leaves at most one line in part; such
a tail is not read, and is cut off before the log goes on. What a line says has happened when it is written:
a decision is in the log before anybody is told of it.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from windtunnel.base.errors import UserError

Event = dict[str, Any]


class LogFailed(Exception):
    """The log cannot be written (a full disk, a folder that is gone): the run cannot go on."""


class EventLog:
    """The log at ``path``, written for the supervisor of ``epoch``."""

    def __init__(self, path: Path, epoch: int) -> None:
        self._path = path
        self._epoch = epoch
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._file, _whole(path))

    def write(self, kind: str, generation: int, t: float | None = None, **fields: Any) -> None:
        """One event. ``t``: time.time() of it, now unless given.

        Raises:
            LogFailed: the line is not in the file.
        """
        head = {
            "t": time.time() if t is None else t,
            "kind": kind,
            "generation": generation,
            "epoch": self._epoch,
        }
        line = json.dumps({**fields, **head}, separators=(",", ":")).encode() + b"\n"
        try:
            written = os.write(self._file, line)
        except OSError as error:
            raise LogFailed(f"{self._path}: {error.strerror}") from error
        if written != len(line):
            raise LogFailed(f"{self._path}: only a part of a line could be written")

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read(path: Path) -> list[Event]:
    """All events at ``path``, without a last line that was not finished; [] if there is no log.

    Raises:
        UserError: a line before the last is no event.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    events = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            event = json.loads(line)
            event["kind"], event["t"], event["generation"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}: line {number} is not an event: {line[:60]!r}") from None
        events.append(event)
    return events


def _whole(path: Path) -> int:
    """Bytes of the lines that are finished."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        end = size
        while end:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0
