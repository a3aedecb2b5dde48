"""Descriptors that outlive this process: what it gives to its supervisor, and what it got from it.

The supervisor is the daemon's watchdog, or systemd (``FileDescriptorStoreMax=``); both speak sd_notify(3) and
sd_listen_fds(3). Where there is none, nothing is kept. What the watchdog of an earlier daemon still holds is
fetched from it by whoever opens the home next.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

LINE = "held.sock"
FETCHED_AT_ONCE = 253
"""Descriptors that the kernel passes in one message."""
PATIENCE = 5.0
"""Seconds that a message to the supervisor, or one from an earlier watchdog, may take."""


class Kept:
    """The descriptors of one home's process, by name; several may have one name. Any thread may use it.

    ``supervised``: take what the supervisor of this process gave it, and give it what is to be kept. To be
    said once, by a process whose children must not take themselves for it.
    """

    def __init__(self, home: Path, *, supervised: bool = False) -> None:
        self._home = home
        self._found: dict[str, list[int]] = {}
        self._line: socket.socket | None = None
        if supervised:
            self._inherit()
        self.fetch()

    @property
    def lasts(self) -> bool:
        """Whether what is kept outlives this process."""
        return self._line is not None

    def ready(self) -> None:
        """Tell the supervisor that this process does its work."""
        self._tell("READY=1", (), wait=True)

    def keep(self, name: str, *fds: int, wait: bool = True) -> bool:
        """Give the supervisor copies of ``fds``. False where it has none: there is no supervisor, or, without
        ``wait``, it is busy."""
        return self._tell(f"FDSTORE=1\nFDNAME={name}", fds, wait=wait)

    def drop(self, name: str) -> None:
        """The supervisor shall close what it has under this name; nothing for an empty one."""
        if name:
            self._tell(f"FDSTOREREMOVE=1\nFDNAME={name}", (), wait=True)

    def names(self) -> list[str]:
        """What was given to this process and is not taken yet."""
        return sorted(self._found)

    def take(self, name: str) -> list[int]:
        """The descriptors of that name, which are the caller's from then on; empty where there are none."""
        return self._found.pop(name, [])

    def settle(self) -> None:
        """Close what nobody took, here and at the supervisor."""
        for name in self.names():
            for fd in self.take(name):
                os.close(fd)
            self.drop(name)

    def fetch(self, seconds: float = 0.0) -> bool:
        """Take over what the watchdog of a daemon that has ended holds; whether there was one within
        ``seconds``."""
        deadline = time.monotonic() + seconds
        while True:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
                line.settimeout(PATIENCE)
                try:
                    line.connect(str(self._home / LINE))
                except OSError:
                    if time.monotonic() >= deadline:
                        return False
                    time.sleep(0.02)
                    continue
                with contextlib.suppress(OSError):
                    while True:
                        name, fds, _, _ = socket.recv_fds(line, 4096, FETCHED_AT_ONCE)
                        if not name:
                            return True
                        self._add(name.decode(), fds)
                        self.keep(name.decode(), *fds)
                return True

    def _inherit(self) -> None:
        address = os.environ.pop("NOTIFY_SOCKET", "")
        count, names, pid = (
            os.environ.pop(name, "") for name in ("LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PID")
        )
        if pid == str(os.getpid()):
            for fd, name in zip(range(3, 3 + int(count)), names.split(":"), strict=False):
                self._add(name, [fd])
        if address:
            self._line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._line.setblocking(False)
            try:
                self._line.connect("\0" + address[1:] if address[0] == "@" else address)
            except OSError:
                self._line = None

    def _add(self, name: str, fds: list[int]) -> None:
        for fd in fds:
            os.set_inheritable(fd, False)
        self._found.setdefault(name, []).extend(fds)

    def _tell(self, text: str, fds: tuple[int, ...], *, wait: bool) -> bool:
        if self._line is None:
            return False
        deadline = time.monotonic() + (PATIENCE if wait else 0.05)
        while True:
            try:
                # a message that comes to nothing costs what it would have kept, and no more
                socket.send_fds(self._line, [text.encode()], fds)
                return True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.001)
            except OSError:
                return False
