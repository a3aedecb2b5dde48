"""The log of a sandbox's turns: a line of JSON each, with its own checksum, only ever appended to."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from windtunnel.agents.sandbox.live.images import plain
from windtunnel.agents.sandbox.live.images.fault import ImageError
from windtunnel.agents.sandbox.model import Turn
from windtunnel.base.atomic import write_all

FORMAT = 1


class TurnLog:
    """The log in ``file``. ``problems`` says, after each ``read``, which lines could not be used and why.

    ``sync``: a turn is on the disk when ``append`` returns; otherwise the system may write it later, and a
    crash of the host may lose the last ones (the checkpoints that cover them are safe in any case).
    """

    def __init__(self, file: Path, *, sync: bool = False) -> None:
        self._path = file
        self._sync = sync
        self.problems: tuple[str, ...] = ()

    def append(self, turn: Turn) -> None:
        """Add a turn. A last line that a crash has torn is closed first, so that it spoils no other."""
        line = plain.sealed("turn", FORMAT, plain.to_plain(turn))
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                size = os.fstat(file).st_size
                torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
                write_all(file, b"\n" + line if torn else line)
                if self._sync:
                    os.fsync(file)
            finally:
                os.close(file)
        except OSError as error:
            raise ImageError(f"the log {self._path} cannot be written: {error}") from error

    def read(self) -> list[Turn]:
        """All turns that can be read, in the order in which they were appended."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            data = b""
        except OSError as error:
            raise ImageError(f"the log {self._path} cannot be read: {error}") from error
        turns, problems = [], []
        *lines, rest = data.split(b"\n")
        for number, line in enumerate(lines, 1):
            where = f"{self._path} line {number}"
            try:
                turns.append(plain.from_plain(Turn, plain.unsealed("turn", FORMAT, line, where)))
            except ImageError as error:
                problems.append(str(error))
            except (TypeError, ValueError, KeyError) as error:
                problems.append(f"{where} is no turn: {error}")
        if rest:
            problems.append(f"{self._path}: the last line was cut off by a crash and is left out")
        self.problems = tuple(problems)
        return turns
