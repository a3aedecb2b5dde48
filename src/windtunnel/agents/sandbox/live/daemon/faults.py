"""Every failure as one sentence with an HTTP status, never as a traceback."""

from __future__ import annotations

import errno
import logging

from windtunnel.agents.sandbox.client.wire import STATUS
from windtunnel.agents.sandbox.errors import SandboxDied
from windtunnel.base.errors import UserError

LOG = logging.getLogger("windtunnel.sandbox.daemon")


class Refused(Exception):
    """An answer other than success, decided by the daemon itself. ``kind`` is one of ``wire.STATUS``."""

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


def told(error: BaseException) -> dict[str, str]:
    """The body of the answer for ``error``: its sentence and its kind."""
    if isinstance(error, Refused):
        return {"error": str(error), "kind": error.kind}
    if isinstance(error, UserError):
        return {"error": str(error), "kind": "user"}
    if isinstance(error, SandboxDied):
        return {"error": str(error), "kind": "died"}
    if isinstance(error, TimeoutError):
        return {"error": str(error), "kind": "late"}
    if _disk_full(error):
        return {
            "error": f"{error}; the disk is full: 'windtunnel sandbox gc' frees what can go",
            "kind": "full",
        }
    if type(error).__module__ == "builtins" and not isinstance(error, OSError):
        LOG.error("a call failed unexpectedly", exc_info=error)
        return {"error": f"sandbox: unexpected {type(error).__name__}: {error}", "kind": "fault"}
    return {"error": str(error) or type(error).__name__, "kind": "fault"}


def status_of(body: dict[str, str]) -> int:
    return STATUS[body["kind"]]


def _disk_full(error: BaseException) -> bool:
    """Whether the disk (or a quota) was the reason, anywhere in the chain."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, OSError) and at.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        at = at.__cause__
    return False
