"""The two outputs of one command, read from files that the host holds open itself.

The host makes the files and keeps their descriptors, so whatever happens to their names inside, it reads
what it made and nothing else. A background process may go on writing after the command's end; that is not
its output any more.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from windtunnel.agents.sandbox.live.machine.inside import Folder

WHOLE = 256 * 2**20
"""Bytes of each output that a result holds at most."""
TAIL = 64 * 2**10
"""Bytes of each output that a result holds of a command whose output was passed on while it ran."""
PIECE = 2**20

OnOutput = Callable[[str, bytes], None]


class Outputs:
    """Standard output and standard error of the command ``token`` of one shell."""

    def __init__(self, folder: Folder, token: str, on_output: OnOutput | None) -> None:
        self.names = {"stdout": f"out.{token}", "stderr": f"err.{token}"}
        self._files: dict[str, int] = {}
        self._read = {"stdout": 0, "stderr": 0}
        self._tails = {"stdout": b"", "stderr": b""}
        self._on_output = on_output
        try:
            for stream, name in self.names.items():
                self._files[stream] = folder.fresh(name)
        except BaseException:
            self.close()
            raise

    @property
    def listened(self) -> bool:
        return self._on_output is not None

    def pass_on(self) -> None:
        """Give what is new to the listener, in pieces; memory stays bounded."""
        if self._on_output is None:
            return
        for stream, file in self._files.items():
            end = os.fstat(file).st_size
            while self._read[stream] < end:
                piece = os.pread(file, min(PIECE, end - self._read[stream]), self._read[stream])
                if not piece:
                    break
                self._read[stream] += len(piece)
                self._tails[stream] = (self._tails[stream] + piece)[-TAIL:]
                self._on_output(stream, piece)

    def result(self) -> tuple[bytes, bytes, list[str]]:
        """Both outputs as they are now, and notes on what is not in them."""
        self.pass_on()
        notes: list[str] = []
        found: list[bytes] = []
        for stream, file in self._files.items():
            size = os.fstat(file).st_size
            if self._on_output is not None:
                found.append(self._tails[stream])
                if self._read[stream] > TAIL:
                    notes.append(f"of {stream}, which was passed on whole, the last {TAIL} bytes are here")
                continue
            found.append(_read(file, min(size, WHOLE)))
            if size > WHOLE:
                notes.append(f"{stream} has {size} bytes, of which the first {WHOLE} are here")
        return found[0], found[1], notes

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()


def _read(file: int, size: int) -> bytes:
    pieces: list[bytes] = []
    at = 0
    while at < size:
        piece = os.pread(file, min(PIECE, size - at), at)
        if not piece:
            break
        pieces.append(piece)
        at += len(piece)
    return b"".join(pieces)
