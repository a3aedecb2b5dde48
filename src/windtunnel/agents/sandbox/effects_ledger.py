"""The journal's file: tables, lineages, and a lock for each effect.

A sandbox's name stands for a *line*, a number. A fork's line has a parent line and the turn up to which that
parent's effects are also its own; so looking an effect up walks from a line to its ancestors.

The kernel frees a lock when its holder dies. WAL with ``synchronous=FULL``: a commit that returned survives
a power cut.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import sqlite3
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCHEMA = """
CREATE TABLE IF NOT EXISTS lines (
    line INTEGER PRIMARY KEY, box TEXT UNIQUE, parent INTEGER, turn INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS effects (
    line INTEGER NOT NULL, key TEXT NOT NULL, intent TEXT NOT NULL, turn INTEGER NOT NULL,
    state TEXT NOT NULL, token TEXT NOT NULL, result TEXT, fault TEXT NOT NULL DEFAULT '',
    planned REAL NOT NULL, ended REAL NOT NULL DEFAULT 0, PRIMARY KEY (line, key)
) WITHOUT ROWID;
"""

SEEN = """
WITH RECURSIVE seen(line, upto, depth) AS (
    SELECT line, 1e18, 0 FROM lines WHERE box = ?
    UNION ALL
    SELECT lines.parent, min(seen.upto, lines.turn), depth + 1 FROM lines JOIN seen USING (line)
    WHERE lines.parent IS NOT NULL
)
SELECT effects.line, key, intent, effects.turn, state, token, result, fault, planned, ended
FROM effects JOIN seen ON effects.line = seen.line AND effects.turn <= seen.upto
"""

COLUMNS = ("line", "key", "intent", "turn", "state", "token", "result", "fault", "planned", "ended")


class Ledger:
    """The tables. Every method is one transaction; threads take turns."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._lock = threading.Lock()
        self._file = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
        self._file.execute("PRAGMA journal_mode=WAL")
        self._file.execute("PRAGMA synchronous=FULL")
        self._file.executescript(SCHEMA)

    def find(self, box: str, key: str) -> dict[str, Any] | None:
        """The effect of this key that the sandbox sees; its own comes before an ancestor's."""
        with self._lock:
            row = self._file.execute(SEEN + " WHERE key = ? ORDER BY depth LIMIT 1", (box, key)).fetchone()
        return _named(box, row) if row else None

    def seen_by(self, box: str) -> list[dict[str, Any]]:
        with self._lock:
            rows = self._file.execute(SEEN + " ORDER BY planned, key", (box,)).fetchall()
        return [_named(box, row) for row in rows]

    def line(self, box: str) -> int:
        """The lineage that the name stands for; begun where there is none."""
        with self._transaction():
            return self._line(box)

    def plan(self, box: str, key: str, intent: str, turn: int, token: str) -> None:
        with self._transaction():
            self._file.execute(
                "INSERT INTO effects (line, key, intent, turn, state, token, planned) "
                "VALUES (?, ?, ?, ?, 'planned', ?, ?) ON CONFLICT (line, key) DO UPDATE SET "
                "turn = excluded.turn, state = 'planned', fault = '', planned = excluded.planned",
                (self._line(box), key, intent, turn, token, time.time()),
            )

    def end(self, box: str, key: str, state: str, *, result: str | None = None, fault: str = "") -> None:
        with self._transaction():
            own = self._file.execute(
                "UPDATE effects SET state = ?, result = ?, fault = ?, ended = ? WHERE line = ? AND key = ?",
                (state, result, fault, time.time(), self._line(box), key),
            )
            if own.rowcount == 0:
                # an effect in doubt of an ancestor, about which this sandbox now knows: kept as its own
                self._file.execute(
                    "INSERT INTO effects SELECT ?, key, intent, turn, ?, token, ?, ?, planned, ? FROM ("
                    + SEEN
                    + " WHERE key = ? ORDER BY depth LIMIT 1)",
                    (self._line(box), state, result, fault, time.time(), box, key),
                )

    def fork(self, source: str, name: str, turn: int) -> bool:
        with self._transaction():
            if self._file.execute("SELECT 1 FROM lines WHERE box = ?", (name,)).fetchone():
                return False
            self._file.execute(
                "INSERT INTO lines (box, parent, turn) VALUES (?, ?, ?)", (name, self._line(source), turn)
            )
            return True

    def retire(self, box: str) -> None:
        with self._transaction():
            self._file.execute("UPDATE lines SET box = NULL WHERE box = ?", (box,))

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def _line(self, box: str) -> int:
        self._file.execute("INSERT OR IGNORE INTO lines (box) VALUES (?)", (box,))
        return int(self._file.execute("SELECT line FROM lines WHERE box = ?", (box,)).fetchone()[0])

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock:
            self._file.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._file.execute("ROLLBACK")
                raise
            self._file.execute("COMMIT")


def _named(box: str, row: tuple[Any, ...]) -> dict[str, Any]:
    found = dict(zip(COLUMNS, row, strict=True)) | {"box": box}
    found["result"] = json.loads(found["result"]) if found["result"] is not None else None
    return found


def identity(intent: str, payload: Any) -> str:
    """The key of an effect that has none: the hash of what it is and what it is done with."""
    text = json.dumps([intent, payload], sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@contextlib.contextmanager
def held(path: Path, name: str) -> Iterator[bool]:
    """Hold the lock called ``name`` of the journal within the block; False when someone else does.

    One byte of a file beside the journal, far beyond its end, stands for each name. The lock belongs to the
    open file, so it holds between threads as well as processes.
    """
    place = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")
    lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            # struct flock: type, whence, start, length, pid (0 for locks of an open file)
            wanted = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
            fcntl.fcntl(lock, fcntl.F_OFD_SETLK, wanted)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(lock)
