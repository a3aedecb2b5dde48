"""Who leads a run: the process that holds the lock on a file in its folder, which goes with that process."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from windtunnel.base.errors import UserError

NAME = "leader.lock"


class Lead:
    """The right to supervise the run in ``folder``, until `release` or the end of this process.

    Raises:
        UserError: somebody else has it.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            leader = os.read(self._file, 256).decode(errors="replace")
            os.close(self._file)
            raise UserError(f"{folder}: this run is running, {leader} leads it") from None
        os.ftruncate(self._file, 0)
        os.write(self._file, f"process {os.getpid()} on {os.uname().nodename}".encode())

    def release(self) -> None:
        os.close(self._file)
