"""A journal of side effects on the world outside: what a rollback cannot take back must not happen twice.

A sandbox that is restored does its work since the checkpoint again. Files and processes bear that; a payment
does not. So such a call goes through ``Journal.perform``, which writes down *planned* before the call and
*done* with the result after it. The journal lies outside the sandbox's root: a rollback leaves it as it is.

What is guaranteed, for calls of one side effect (the same sandbox, or forks since before it, the same
``key``):

- At most once. A call whose end is not known (the process died between planned and done, or the call raised
  something that does not say) is never made again; ``perform`` raises ``SideEffectInDoubt``.
- Exactly once, if in addition the service can tell: either it honours the idempotency key that ``call`` is
  given (say so by ``idempotent=True``: the call is then made again with the same key), or ``check`` asks it
  whether the side effect with that key happened. Then doubt is settled at the next ``perform``.
- A call that raises ``NotDone`` did not happen; it is made again when it is next asked for.
- The result of a done side effect is returned without a call, for as long as the journal exists.

Without ``key`` the key is the hash of the intent and its payload, so that asking twice for the same thing is
one side effect. Forks share those of the turns before the fork: a sandbox's name stands for a *line*, and a
fork's line has a parent line and the turn up to which that parent's side effects are also its own.

Source: the write-ahead rule of databases; Crab (arXiv 2604.28138) names such effects as outside its scope.
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
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from windtunnel.agents.sandbox.protocol import Closing
from windtunnel.base.errors import UserError

State = Literal["planned", "done", "failed", "unknown"]
Check = Callable[[str], Any]
"""Asks the service, by idempotency key, whether the side effect happened. Returns its result (anything JSON
can hold, not None) when it did, None when it certainly did not, and raises when it cannot tell."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS lines (
    line INTEGER PRIMARY KEY, box TEXT UNIQUE, parent INTEGER, turn INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS effects (
    line INTEGER NOT NULL, key TEXT NOT NULL, intent TEXT NOT NULL, turn INTEGER NOT NULL,
    state TEXT NOT NULL, token TEXT NOT NULL, result TEXT, fault TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (line, key)
) WITHOUT ROWID;
"""
SEEN = """
WITH RECURSIVE seen(line, upto, depth) AS (
    SELECT line, 1e18, 0 FROM lines WHERE box = ?
    UNION ALL
    SELECT lines.parent, min(seen.upto, lines.turn), depth + 1 FROM lines JOIN seen USING (line)
    WHERE lines.parent IS NOT NULL
)
SELECT effects.line, key, intent, effects.turn, state, token, result, fault
FROM effects JOIN seen ON effects.line = seen.line AND effects.turn <= seen.upto
"""


class SideEffectError(Exception):
    """A fault of the journal, or a side effect whose outcome cannot be given."""


class SideEffectInDoubt(SideEffectError):
    """The side effect may have happened or not. It is not tried again."""


class SideEffectUnderWay(SideEffectError):
    """Another thread or process is performing this side effect, and did not end within the time allowed."""


class NotDone(Exception):
    """Raised by a call to say that its side effect certainly did not happen: it may be tried again."""


@dataclass(frozen=True)
class SideEffect:
    """One entry of the journal. ``line``: the lineage it belongs to, its sandbox's own or an ancestor's.
    ``turn``: the turn in which it was last tried. ``token``: the idempotency key. ``fault``: what the call
    raised, where it did."""

    line: int
    key: str
    intent: str
    turn: int
    state: State
    token: str
    result: Any
    fault: str


class Journal(Closing):
    """The side effects of many sandboxes, in one SQLite file. Any number of threads and processes may share
    it; each write is one transaction that survives a power cut."""

    wait_seconds = 60.0
    """For which a side effect that another one performs is waited for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._lock = threading.Lock()
        # so that every transaction, which begins with its first write, holds the file from then on
        self._file = sqlite3.connect(path, timeout=30, isolation_level="IMMEDIATE", check_same_thread=False)
        self._file.execute("PRAGMA journal_mode=WAL")
        self._file.execute("PRAGMA synchronous=FULL")
        self._file.executescript(SCHEMA)

    def perform(
        self,
        box: str,
        turn: int,
        intent: str,
        call: Callable[[str], Any],
        *,
        payload: Any = None,
        key: str | None = None,
        check: Check | None = None,
        idempotent: bool = False,
    ) -> Any:
        """Make a side effect happen, or give the result of the time it did.

        ``turn``: number of the turn under way (one more than the turns that have ended). ``intent``: what
        kind of side effect, in words. ``payload``: what it is done with, anything JSON can hold; with
        ``intent`` it makes the key where ``key`` is not given. ``call`` gets the idempotency key and returns
        anything JSON can hold.

        Raises SideEffectInDoubt, SideEffectUnderWay, or what ``call`` raised.
        """
        if not box or not intent or turn < 0:
            raise UserError(
                f"side effects: box {box!r}, intent {intent!r} and turn {turn} are not accepted; "
                "name both, and count turns from 0"
            )
        if key is None:
            text = json.dumps([intent, payload], sort_keys=True, separators=(",", ":"), allow_nan=False)
            key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        with self._lock, self._file:
            own = self._line(box)
        with contextlib.ExitStack() as locks:
            entry = self._find(box, key)
            if entry is None or entry.state != "done":
                self._lock_out_others(locks, box, own, key)
                entry = self._find(box, key)
            if entry is not None and entry.line != own and entry.state in ("planned", "unknown"):
                # its sandbox may be in the middle of it just now
                self._lock_out_others(locks, box, entry.line, key)
                entry = self._find(box, key)
            if entry is not None and entry.state == "done":
                if entry.fault:
                    raise SideEffectError(f"{_words(box, entry)} happened, but {entry.fault}")
                return entry.result
            # a new one for each side effect, so that a name used again cannot meet an old one
            token, doubt = f"windtunnel-{os.urandom(16).hex()}", False
            if entry is not None and entry.line == own:
                token = entry.token
            if entry is not None and entry.state in ("planned", "unknown"):
                if idempotent:
                    # the same side effect still: forks since its first try go on to share the doubt
                    token, turn, doubt = entry.token, entry.turn, True
                else:
                    happened = self._ask(box, entry, check)
                    if happened is not None:
                        return happened
            planned = SideEffect(own, key, intent, turn, "planned", token, None, "")
            self._write(planned)
            return self._make(planned, box, call, doubt)

    def side_effects(self, box: str) -> list[SideEffect]:
        """All that a sandbox sees, its ancestors' before the fork too, in the order of their turns."""
        with self._lock:
            rows = self._file.execute(SEEN + " ORDER BY effects.turn, key", (box,)).fetchall()
        return [_read(row) for row in rows]

    def fork(self, source: str, name: str, turn: int) -> None:
        """``name`` begins as ``source`` was when its turn ``turn`` ended: side effects until then are shared.

        Raises UserError when ``name`` has a past of its own; ``retire`` ends that.
        """
        with self._lock, self._file:
            row = (name, self._line(source), turn)
            if self._file.execute("SELECT 1 FROM lines WHERE box = ?", (name,)).fetchone():
                raise UserError(f"side effects: sandbox {name!r} has a past already; retire it first")
            self._file.execute("INSERT INTO lines (box, parent, turn) VALUES (?, ?, ?)", row)

    def retire(self, box: str) -> None:
        """The sandbox is removed: one made later under its name starts anew. Its forks keep what they share
        with it."""
        with self._lock, self._file:
            self._file.execute("UPDATE lines SET box = NULL WHERE box = ?", (box,))

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()

    def _ask(self, box: str, entry: SideEffect, check: Check | None) -> Any:
        """The result, if the side effect in doubt happened after all; None if it did not. Raises
        SideEffectInDoubt."""
        what = f"{_words(box, entry)} (turn {entry.turn}, key {entry.token}) may have happened"
        if check is None:
            why = entry.fault or "its process ended during the call"
            raise SideEffectInDoubt(f"{what}: {why}; it is not tried again")
        try:
            happened = check(entry.token)
        except Exception as error:
            raise SideEffectInDoubt(f"{what}, and the check failed: {error}") from error
        if happened is not None:
            with self._lock, self._file:
                own = self._line(box)  # what it knows now of an ancestor's is its own
            self._write(replace(entry, line=own, state="done", result=happened, fault=""))
        return happened

    def _make(self, planned: SideEffect, box: str, call: Callable[[str], Any], doubt: bool) -> Any:
        try:
            result = call(planned.token)
        except NotDone as error:
            # that this call did nothing says nothing about an earlier one
            self._write(replace(planned, state="unknown" if doubt else "failed", fault=str(error)))
            raise
        except BaseException as error:
            self._write(replace(planned, state="unknown", fault=f"{type(error).__name__}: {error}"))
            raise
        done = replace(planned, state="done")
        try:
            self._write(replace(done, result=result))
        except (TypeError, ValueError) as error:
            fault = f"its result cannot be recorded: {error}"
            self._write(replace(done, fault=fault))
            raise SideEffectError(f"{_words(box, planned)} happened, but {fault}") from error
        return result

    def _find(self, box: str, key: str) -> SideEffect | None:
        """The one of this key that the sandbox sees; its own comes before an ancestor's."""
        with self._lock:
            row = self._file.execute(SEEN + " WHERE key = ? ORDER BY depth LIMIT 1", (box, key)).fetchone()
        return _read(row) if row else None

    def _write(self, effect: SideEffect) -> None:
        """Raises TypeError or ValueError, with nothing written, for a result that JSON cannot hold."""
        of, result = effect, effect.result
        text = None if result is None else json.dumps(result, allow_nan=False)
        row = (of.line, of.key, of.intent, of.turn, of.state, of.token, text, of.fault)
        with self._lock, self._file:
            self._file.execute("INSERT OR REPLACE INTO effects VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)

    def _line(self, box: str) -> int:
        """The lineage that the name stands for; begun where there is none."""
        self._file.execute("INSERT OR IGNORE INTO lines (box) VALUES (?)", (box,))
        return int(self._file.execute("SELECT line FROM lines WHERE box = ?", (box,)).fetchone()[0])

    def _lock_out_others(self, locks: contextlib.ExitStack, box: str, line: int, key: str) -> None:
        """Be the only one on this machine that performs this side effect. A process that dies lets go.

        One byte of a file beside the journal, far beyond its end, stands for each. The lock belongs to the
        open file, so it holds between threads as well as processes.
        """
        name = hashlib.blake2b(f"{line}\0{key}".encode(), digest_size=7).digest()
        # struct flock: type, whence, start, length, pid (0 for locks of an open file)
        byte_lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, int.from_bytes(name, "big"), 1, 0)
        file = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        locks.callback(os.close, file)
        deadline = time.monotonic() + self.wait_seconds
        while True:
            try:
                fcntl.fcntl(file, fcntl.F_OFD_SETLK, byte_lock)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise SideEffectUnderWay(
                        f"a side effect of sandbox {box} is being performed by someone else, for more than "
                        f"{self.wait_seconds:g} s"
                    ) from None
                time.sleep(0.005)


def _words(box: str, side_effect: SideEffect) -> str:
    return f"side effect {side_effect.intent!r} of sandbox {box}"


def _read(row: tuple[Any, ...]) -> SideEffect:
    effect = SideEffect(*row)
    return effect if effect.result is None else replace(effect, result=json.loads(effect.result))
