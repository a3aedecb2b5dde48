"""What is left of an epoch, who has what, and the log by which a master that was killed knows it again.

Every change is an entry: it is appended to the log first, and holds when it is there; so the state is what
replaying the log gives. A line is a checksum and the entry (CRC-32, JSON). A part of a line at the end is of
a writer that was killed, and cut off; any other line that does not fit its checksum is refused. When a log is
opened it is written anew, as the one entry that says the state; so one process at a time has it, by a lock on
its folder.

The log is not synced: a power loss may take its last entries. What clients then say of themselves when they
connect again is at least what these said, and counts.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windtunnel.base import atomic, ranges
from windtunnel.base.errors import HostError, UserError
from windtunnel.linux.system import opened

NAME = "progress.log"
DONE = -1
"""In the place of a split's next batch: there is none."""
Entry = dict[str, Any]


class LogFull(HostError):
    """An entry could not be written; nothing has changed."""


@dataclass
class SplitState:
    """``held``: which client has a split. ``marks``: the next batch of a split, `DONE` after the last.
    ``claims``: the same, of what each client has consumed itself, by which it can be taken back to its
    checkpoint. ``came``: clients that are in the epoch; where they go back to a checkpoint, those that have.
    ``ended``: clients whose epoch is over. ``skipped``: splits given up for an error, of this epoch.
    ``last``: the steps after which it is over for all ranks, where they end together; -1: not known."""

    epoch: int = 0
    owners: dict[int, str] = field(default_factory=dict)
    marks: dict[int, int] = field(default_factory=dict)
    claims: dict[str, dict[int, int]] = field(default_factory=dict)
    came: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    skipped: dict[int, str] = field(default_factory=dict)
    last: int = -1
    failed: str = ""

    def apply(self, entry: Entry) -> None:
        """One change."""
        match entry["op"]:
            case "came":
                self.came.add(entry["client"])
            case "back":
                self.came = set()
            case "grant":
                self.owners[entry["split"]] = entry["client"]
            case "ack":
                claims = self.claims.setdefault(entry["client"], {})
                for split, mark in entry["marks"]:
                    claims[split] = mark
                    self._mark(split, mark)
            case "free":
                for split in entry["splits"]:
                    self.owners.pop(split, None)
            case "skip":
                self.skipped[entry["split"]] = entry["why"]
                self._mark(entry["split"], DONE)
            case "end":
                self.ended.add(entry["client"])
            case "last":
                self.last = entry["steps"]
            case "epoch":
                self._renew(entry["epoch"])
            case "rewind":
                if entry["epoch"] != self.epoch:
                    self._renew(entry["epoch"])
                self.claims[entry["client"]] = dict(entry["marks"])
                self.ended.discard(entry["client"])
                self.last = -1
                for split in [number for number, client in self.owners.items() if client == entry["client"]]:
                    del self.owners[split]
                self.marks = dict.fromkeys(self.skipped, DONE)
                for claims in self.claims.values():
                    for split, mark in claims.items():
                        self._mark(split, mark, free=False)
            case "fail":
                self.failed = entry["why"]
            case "state":
                self._load(entry)

    def _mark(self, split: int, mark: int, free: bool = True) -> None:
        old = self.marks.get(split, 0)
        self.marks[split] = DONE if DONE in (old, mark) else max(old, mark)
        if free and self.marks[split] == DONE:
            self.owners.pop(split, None)

    def _renew(self, epoch: int) -> None:
        self.epoch, self.last = epoch, -1
        self.owners, self.marks, self.claims, self.skipped = {}, {}, {}, {}
        self.came, self.ended = set(), set()

    def entry(self) -> Entry:
        """The one entry that says all of it."""
        return {
            "op": "state", "epoch": self.epoch, "held": list(self.owners.items()),
            "marks": packed(self.marks),
            "claims": {client: packed(claims) for client, claims in self.claims.items()},
            "came": sorted(self.came), "ended": sorted(self.ended), "skipped": list(self.skipped.items()),
            "failed": self.failed, "last": self.last,
        }  # fmt: skip

    def _load(self, entry: Entry) -> None:
        self.epoch, self.failed = entry["epoch"], entry["failed"]
        self.owners, self.skipped = dict(entry["held"]), dict(entry["skipped"])
        self.last = entry["last"]
        self.marks = unpacked(entry["marks"])
        self.claims = {client: unpacked(claims) for client, claims in entry["claims"].items()}
        self.came, self.ended = set(entry["came"]), set(entry["ended"])


def packed(marks: dict[int, int]) -> dict[str, Any]:
    """Marks in few words: splits that are done as ranges, and pairs of the others."""
    done = (split for split, mark in marks.items() if mark == DONE)
    return {"done": ranges.write(done), "next": [pair for pair in marks.items() if pair[1] != DONE]}


def unpacked(plain: dict[str, Any]) -> dict[int, int]:
    """What `packed` packed.

    Raises:
        ValueError, TypeError, KeyError: it did not.
    """
    states = dict.fromkeys(ranges.read(plain["done"]), DONE)
    for split, mark in plain["next"]:
        if type(split) is not int or type(mark) is not int or mark < 0:
            raise ValueError(f"{split!r}: {mark!r} is no mark")
        states[split] = mark
    return states


class SplitLog:
    """The state, and its log at ``path``. ``session``: what identifies the session that it is of."""

    def __init__(self, path: Path, session: str) -> None:
        self.path = path
        self.state = SplitState()
        with contextlib.ExitStack() as files:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                fcntl.flock(files.enter_context(opened(path.parent)), fcntl.LOCK_EX | fcntl.LOCK_NB)
                for entry in _entries(path, session):
                    self.state.apply(entry)
                lines = [_line({"session": session}), _line(self.state.entry())]
                atomic.replace(path, b"".join(lines), durable=True)
                self._file = files.enter_context(opened(path, os.O_RDWR | os.O_APPEND))
            except BlockingIOError:
                raise UserError(
                    f"{path.parent}: a master runs in it, accepted is a folder for each"
                ) from None
            except OSError as error:
                raise HostError(f"{path}: the master's log cannot be written: {error.strerror}") from error
            self._files = files.pop_all()

    def write(self, op: str, **fields: Any) -> None:
        """One change.

        Raises:
            LogFull: the log does not take it, and nothing has changed.
        """
        entry = {"op": op, **fields}
        try:
            atomic.append_line(self._file, _line(entry))
        except OSError as error:
            raise LogFull(f"{self.path}: the master's log cannot be written: {error.strerror}") from error
        self.state.apply(entry)

    def close(self) -> None:
        self._files.close()


def _line(entry: Entry) -> bytes:
    text = json.dumps(entry, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _entries(path: Path, session: str) -> Iterable[Entry]:
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path}: the master's log cannot be read: {error.strerror}") from error
    entries = []
    for number, line in enumerate(lines, 1):
        sum_, _, text = line.partition(b" ")
        entry = None
        with contextlib.suppress(ValueError):
            if int(sum_, 16) == zlib.crc32(text):
                entry = json.loads(text)
        if entry is None:
            raise UserError(f"{path}: line {number} is damaged; a log that has it cannot be gone on with")
        entries.append(entry)
    if entries and entries[0].get("session") != session:
        raise UserError(
            f"{path}: it is the log of another session or table; accepted is a folder of its own for each"
        )
    return entries[1:]
