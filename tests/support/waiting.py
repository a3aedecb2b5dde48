"""Waiting for what must come: no test sleeps for a time that it guessed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

PATIENCE = 90.0
"""Seconds after which something will not come any more. It bounds a failure, so it may be generous."""


def until(what: Callable[[], T], timeout: float = PATIENCE, told: Callable[[], Any] | str = "") -> T:
    """The first true value of ``what``; ``told`` is shown (called, if it can be) should none come."""
    last = time.monotonic() + timeout
    while not (found := what()):
        if time.monotonic() > last:
            shown = told() if callable(told) else told
            raise AssertionError(f"did not come true within {timeout:g} s: {shown or what}")
        time.sleep(0.01)
    return found


def gone(pid: int) -> bool:
    """Whether no process has this number any more."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
