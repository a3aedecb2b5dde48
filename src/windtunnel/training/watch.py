"""A parent that does nothing but wait for its launcher, and start another one when a signal kills it.

`split` forks: the child goes on as if nothing had happened, and tells by which name its run can be resumed;
the parent never returns. Orphans of a killed launcher (its agents) become children of the parent, which
reaps them. A launcher that ends by itself, with whatever status, is not followed by another.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass

from windtunnel.linux.system import adopt_orphans

MOST = 10
"""Launchers that follow the first."""
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Alone:
    """A launcher that nobody watches. ``before``: the run to resume, None where it is to be begun."""

    before: str | None = None

    def tell(self, name: str) -> None:
        """The run can be resumed as ``name`` from now on."""


@dataclass(frozen=True)
class Watched(Alone):
    """A launcher with a parent that watches it."""

    file: int = -1

    def tell(self, name: str) -> None:
        os.pwrite(self.file, name.encode(), 0)


def split() -> Watched:
    """Go on in a child; here, end with its status once one has ended by itself.

    Raises:
        SystemExit: in the parent.
    """
    file = os.memfd_create("windtunnel-watch")
    adopt_orphans()
    for _ in range(MOST + 1):
        before = os.pread(file, 4096, 0).decode() or None
        child = os.fork()
        if child == 0:
            return Watched(before, file)
        asked, status = _wait(child)
        number = -os.waitstatus_to_exitcode(status)
        if number <= 0 or asked:
            raise SystemExit(-number if number <= 0 else 128 + number)
        told = f"the launcher was killed by {signal.Signals(number).name}; another one goes on"
        os.write(2, f"windtunnel {told}\n".encode())
    os.write(2, f"windtunnel: {MOST + 1} launchers were killed one after the other\n".encode())
    raise SystemExit(1)


def _wait(child: int) -> tuple[bool, int]:
    """Whether this process was asked to end meanwhile, which is passed on, and how the child ended."""
    asked = False

    def pass_on(number: int, _: object) -> None:
        nonlocal asked
        asked = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    before = [(number, signal.signal(number, pass_on)) for number in _PASSED_ON]
    try:
        while True:
            ended, status = os.wait()
            if ended == child:
                return asked, status
    finally:
        for number, handler in before:
            signal.signal(number, handler)
