"""Who leads a run: one supervisor at a time, each under a higher epoch than the one before.

The record of it (`Leader`) lies with the event log. It is changed by `swap` alone, which compares the epoch
first: of two that want to follow the same leader one wins, and the other is told (`Superseded`). A leader
says again and again that it is there (`renew`); one that was stopped for long finds another epoch when it
wakes up, and steps back. Agents refuse what carries a lower epoch than they have seen.

Who wants to take over looks whether the record moves for a `TERM`: no clocks are compared, so it works from
another host. On the leader's own host its death is seen at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from windtunnel.base import atomic
from windtunnel.base.errors import UserError
from windtunnel.base.processes import Adopted, Identity
from windtunnel.linux.system import locked

if TYPE_CHECKING:
    from windtunnel.store.sharedlog import SharedLog

NAME = "leader.json"
TERM = 2.0
"""Seconds without a sign after which a leader may be followed by another."""
RENEWALS = 4
"""Signs in a term."""


class Superseded(UserError):
    """Another supervisor leads the run."""


@dataclass(frozen=True)
class Leader:
    """``beat``: grows while it leads. ``holder``: its process (`Identity` as text) on ``host``, "" when it
    went in order. ``address``: "host:port" where it listens, or listened last."""

    epoch: int = 0
    beat: int = 0
    holder: str = ""
    host: str = ""
    address: str = ""

    @property
    def process(self) -> Adopted | None:
        """Where it is one of this host and this boot, and lives."""
        with contextlib.suppress(ValueError):
            identity = Identity.parse(self.holder)
            return Adopted(identity) if identity.lives() else None
        return None

    @property
    def gone(self) -> bool:
        """Whether it surely does not lead any more."""
        return not self.holder or (self.host == os.uname().nodename and self.process is None)

    def __str__(self) -> str:
        pid = self.holder.partition(" ")[0]
        return f"process {pid} on {self.host}" if pid else f"{self.host}, which went in order,"


class Record(Protocol):
    """Where the leader of one run is written down."""

    where: str

    def read(self) -> Leader:
        """Raises UserError when it cannot be read."""

    def swap(self, epoch: int, leader: Leader) -> bool:
        """Write ``leader`` if the present one has that ``epoch``; whether it was so."""


class FileRecord:
    """In the run's folder, which may lie on storage that hosts share."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self.where = str(folder)

    def read(self) -> Leader:
        try:
            return Leader(**json.loads(self._path.read_text()))
        except FileNotFoundError:
            return Leader()
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{self._path}: no record of a run's leader ({error})") from error

    def swap(self, epoch: int, leader: Leader) -> bool:
        with locked(self._path.with_suffix(".lock")):
            if self.read().epoch != epoch:
                return False
            atomic.replace(self._path, json.dumps(asdict(leader)) + "\n", durable=leader.epoch > epoch)
        return True


class SharedRecord:
    """In the database that has the log."""

    def __init__(self, log: SharedLog) -> None:
        self._log, self.where = log, log.where

    def read(self) -> Leader:
        epoch, told = self._log.leader()
        return Leader(**{**told, "epoch": epoch})

    def swap(self, epoch: int, leader: Leader) -> bool:
        return self._log.swap(epoch, leader.epoch, asdict(leader))


def record_of(folder: Path, log: SharedLog | None) -> Record:
    """That of the run in ``folder``, or of the one whose log is shared."""
    return FileRecord(folder) if log is None else SharedRecord(log)


@dataclass
class Leadership:
    """The right to supervise a run, until `release` or until somebody else has taken it. ``attended``:
    whether its launcher moves; while it does not there is no sign, so that somebody else may take the run."""

    record: Record
    leader: Leader
    attended: Callable[[], bool] = lambda: True
    due: float = 0.0

    @property
    def epoch(self) -> int:
        return self.leader.epoch

    def renew(self, now: float, address: str | None = None) -> None:
        """A sign, where one is due; ``address``: where this leader listens, told at once.

        Raises:
            Superseded: another supervisor leads the run.
        """
        if now < self.due and address is None:
            return
        self.due = now + TERM / RENEWALS
        beat = self.leader.beat + self.attended()
        self._write(replace(self.leader, beat=beat, address=address or self.leader.address))

    def release(self) -> None:
        """Go in order: whoever comes next need not wait."""
        with contextlib.suppress(Superseded):
            self._write(replace(self.leader, holder=""))

    def _write(self, leader: Leader) -> None:
        if not self.record.swap(self.epoch, leader):
            raise superseded(self.record)
        self.leader = leader


def lead(record: Record, after: int | None = None, attended: Callable[[], bool] = lambda: True) -> Leadership:
    """Take the run under the next epoch. ``after``: the epoch of the leader that is followed, which was found
    gone or silent (0: there was none), and is killed if it is stopped on this host; None: any that is gone.

    Raises:
        UserError: somebody leads it. Superseded: somebody else has followed that leader.
    """
    before = record.read()
    if after is None and not before.gone:
        told = f"{before} supervises this run already; end it, or use another folder"
        raise UserError(f"{record.where}: {told}")
    if after is not None and before.epoch != after:
        raise superseded(record)
    if after is not None and before.process is not None and before.process.pid != os.getpid():
        before.process.kill()  # it may hold the record's lock
    own = Leader(before.epoch + 1, 0, str(Identity.own()), os.uname().nodename, before.address)
    if not record.swap(before.epoch, own):
        raise superseded(record)
    return Leadership(record, own, attended)


def superseded(record: Record) -> Superseded:
    """The sentence for who was followed by another."""
    now = record.read()
    return Superseded(f"{record.where}: {now} leads this run now (epoch {now.epoch})")


def silent(record: Record, term: float = TERM) -> Leader | None:
    """The leader, once it is sure to be gone or gave no sign for a ``term``; None if it goes on leading.

    One sign alone may have been its last."""
    seen, signs = record.read(), 0
    last = time.monotonic() + term
    while not seen.gone and time.monotonic() < last:
        time.sleep(term / RENEWALS / 8)
        now = record.read()
        if now != seen:
            seen, signs, last = now, signs + 1, time.monotonic() + term
        if signs > 1:
            return None
    return seen
