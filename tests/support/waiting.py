"""Waiting for what must come: no test sleeps for a time that it guessed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from windtunnel.linux import processes

T = TypeVar("T")

PATIENCE = 90.0
"""Seconds after which something will not come any more. It bounds a failure, so it may be generous."""


def until(what: Callable[[], T], event: str = "", *, timeout: float = PATIENCE) -> T:
    """The first true value of ``what``; ``event`` says what did not come, should none come."""
    last = time.monotonic() + timeout
    while not (outcome := what()):
        assert time.monotonic() < last, f"did not come within {timeout:g} s: {event or what}"
        time.sleep(0.005)
    return outcome


def gone(pid: int) -> bool:
    """Whether the process has ended: what nobody has waited for yet (an orphan of a lazy init) has, too."""
    return processes.state(pid) in ("", "X", "Z")


def killed(pids: Iterable[int]) -> bool:
    """Whether there is none of ``pids``; those that are there are killed."""
    here = list(pids)
    for pid in here:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return not here
