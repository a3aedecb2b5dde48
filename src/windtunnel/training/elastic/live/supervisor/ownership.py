"""Who owns a run: one supervisor at a time, each under a higher epoch than the one before.

The owner holds a lock (flock) on ``supervisor.lock`` in the run's folder, which the kernel takes back when
the owner dies, however it dies. Under the lock it raises the epoch in ``epoch`` by one; agents refuse what
carries a lower epoch than they have seen, so that an owner that was stopped for long cannot speak for the run
when it wakes up. ``supervisor.json`` says where the owner listens; the next one listens there again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from windtunnel.base import atomic
from windtunnel.base.errors import UserError

LOCK, EPOCH, ADDRESS = "supervisor.lock", "epoch", "supervisor.json"
PATIENCE = 0.3
"""Seconds for which a held lock is asked for again: others look at the lock for an instant (`owned`)."""


@dataclass
class Ownership:
    """The right to supervise the run in ``folder``, until `release` or the end of the process."""

    folder: Path
    epoch: int
    lock: int

    def release(self) -> None:
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


def own(folder: Path) -> Ownership:
    """Take the run in ``folder``.

    Raises:
        UserError: another supervisor holds it; it is named by its process id.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    last = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() < last:
                time.sleep(0.01)
                continue
            holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            raise UserError(
                f"{folder}: process {holder} supervises this run already; end it, or use another folder"
            ) from None
    try:
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        epoch = _last_epoch(folder / EPOCH) + 1
        atomic.replace(folder / EPOCH, f"{epoch}\n", durable=True)
    except BaseException:
        os.close(lock)
        raise
    return Ownership(folder, epoch, lock)


def owned(folder: Path) -> bool:
    """Whether a supervisor owns the run in ``folder`` now."""
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def publish(folder: Path, address: str, epoch: int) -> None:
    """Say where the owner listens."""
    atomic.replace(
        folder / ADDRESS, json.dumps({"address": address, "pid": os.getpid(), "epoch": epoch}) + "\n"
    )


def published(folder: Path) -> str | None:
    """ "host:port" where the last owner listened, None if there was none."""
    with contextlib.suppress(OSError, ValueError):
        address = json.loads((folder / ADDRESS).read_text())["address"]
        return str(address)
    return None


def _last_epoch(path: Path) -> int:
    try:
        text = path.read_text()
    except FileNotFoundError:
        return 0
    if not text.strip().isdigit():
        raise UserError(f"{path}: {text.strip()[:40]!r} is not the number of an epoch")
    return int(text)
