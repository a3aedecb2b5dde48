"""The record of one sandbox's conversation: every reply to its main loop, byte for byte.

A sandbox that comes back from a checkpoint asks again what it had asked before. It gets the recorded reply,
so that it goes on as it did; a model asked anew would answer otherwise, and wonder at files that it does not
remember. The sandbox's lives are numbered: a record is given out once in each *incarnation*, oldest first.
So a second asking within one incarnation is a wish for another answer and goes to the model, unless the first
reply was never received.

A rollback on purpose is a wish for another answer too: it sets the records from its turn on *aside*. The
reply to the request that was in flight at a checkpoint counts as after it.

The file lies outside the sandbox's root. Of a request its digest is kept, so that no key is ever written.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path

from windtunnel.agents.sandbox.place import Home
from windtunnel.agents.sandbox.proxy.gate import ArrivingReply, Reply, ReplyWindow

SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    id INTEGER PRIMARY KEY, request TEXT NOT NULL UNIQUE, digest TEXT NOT NULL, turn INTEGER NOT NULL,
    status INTEGER NOT NULL, headers TEXT NOT NULL, body BLOB NOT NULL, answered REAL NOT NULL,
    aside INTEGER NOT NULL, served INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS state (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""


def conversation_file(home: Home, box: str) -> Path:
    """Where a sandbox's conversation is recorded: on the host, out of the sandbox's reach."""
    return home.box(box) / "conversation.sqlite"


@dataclass(eq=False)
class MainLoopRequest:
    """One request of the main loop. ``turn``: the newest turn whose end it was in flight at, 0 until that is
    known. ``served``: the incarnation in which its reply was last received in full. ``complete``: the reply
    is on the disk; ``arriving``: it is under way. ``window``: the newest one that it waited for."""

    request: str
    digest: str
    turn: int = 0
    aside: bool = False
    served: int = -1
    complete: bool = False
    arriving: ArrivingReply | None = None
    window: ReplyWindow | None = None


class Conversation:
    """The record of one sandbox. ``find`` and ``begin`` only use memory; the rest reads or writes the disk,
    from one thread at a time. What was written survives a power cut."""

    def __init__(self, path: Path) -> None:
        self._file = _opened(path)
        self._file.execute("PRAGMA journal_mode=WAL")
        self._file.execute("PRAGMA synchronous=FULL")
        self._file.executescript(SCHEMA)
        state = dict(self._file.execute("SELECT name, value FROM state").fetchall())
        self.incarnation = int(state.get("incarnation", 0))
        self.covered = int(state.get("covered", 0))
        """Turns that the checkpoint covers from which this incarnation began."""
        self.entries: dict[str, list[MainLoopRequest]] = {}
        """By digest, oldest first."""
        rows = self._file.execute("SELECT request, digest, turn, aside, served FROM records ORDER BY id")
        for request, digest, turn, aside, served in rows:
            entry = MainLoopRequest(request, digest, turn, bool(aside), served, complete=True)
            self.entries.setdefault(digest, []).append(entry)

    def find(self, digest: str) -> MainLoopRequest | None:
        """The oldest such request whose reply this incarnation has not received yet."""
        for entry in self.entries.get(digest, ()):
            if not entry.aside and (not entry.complete or entry.served < self.incarnation):
                return entry
        return None

    def begin(self, request: str, digest: str) -> MainLoopRequest:
        """Another one. It is only in memory until it is ``answered``."""
        entry = MainLoopRequest(request, digest)
        self.entries.setdefault(digest, []).append(entry)
        return entry

    def answered(self, entry: MainLoopRequest, reply: Reply) -> None:
        """Write down the whole reply; from now on it can be given again."""
        with self._file:
            self._file.execute(
                "INSERT INTO records (request, digest, turn, status, headers, body, answered, aside, served) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(entry.request, entry.digest, entry.turn, reply.status, json.dumps(reply.headers)),
                    *(reply.body, time.time(), entry.aside, entry.served),
                ),
            )
        entry.complete = True

    def save(self, entry: MainLoopRequest) -> None:
        """What is known of it has changed."""
        with self._file:
            self._update([entry])

    def reply(self, entry: MainLoopRequest) -> Reply:
        status, headers, body = self._file.execute(
            "SELECT status, headers, body FROM records WHERE request = ?", (entry.request,)
        ).fetchone()
        return Reply(status, tuple((name, value) for name, value in json.loads(headers)), bytes(body))

    def begin_anew(self, turn: int, on_purpose: bool) -> None:
        """The sandbox begins anew as it was after ``turn``: what it asks again is answered as before, or
        otherwise, where it was brought back ``on_purpose``."""
        aside = [entry for some in self.entries.values() for entry in some] if on_purpose else []
        aside = [entry for entry in aside if entry.turn >= turn or not entry.turn]
        self.incarnation += 1
        self.covered = turn
        for entry in aside:
            entry.aside = True
        with self._file:
            self._update(aside)
            state = {"incarnation": str(self.incarnation), "covered": str(turn)}
            self._file.executemany("INSERT OR REPLACE INTO state VALUES (?, ?)", state.items())

    def copy_to(self, path: Path) -> None:
        """A second record, equal to this one."""
        with contextlib.closing(_opened(path)) as copy:
            self._file.backup(copy)

    def close(self) -> None:
        self._file.close()

    def _update(self, entries: list[MainLoopRequest]) -> None:
        rows = [(entry.turn, entry.aside, entry.served, entry.request) for entry in entries]
        self._file.executemany("UPDATE records SET turn = ?, aside = ?, served = ? WHERE request = ?", rows)


def _opened(path: Path) -> sqlite3.Connection:
    """The file, which only this user may read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    return sqlite3.connect(path, timeout=30, check_same_thread=False)
