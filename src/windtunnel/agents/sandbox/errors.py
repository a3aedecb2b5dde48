"""What goes wrong with sandboxes: what their parts report, and what the user is told.

A part's error is caught by the operation that asked the part, which puts everything back and raises a
`SandboxError` that says what became of the sandbox.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any, ClassVar

from windtunnel.agents.sandbox.model import CheckpointManifest, Lack, RestoreReport
from windtunnel.base.errors import HostError


class SandboxError(HostError):
    """A fault of the machine or of a sandbox, in a sentence; earlier checkpoints are untouched."""

    travels: ClassVar[dict[str, Any]] = {"details": str}


class SandboxDied(SandboxError):
    """The sandbox's processes are gone. A restore brings its newest checkpoint back."""


class IncompleteError(SandboxError):
    """What was asked for was done in part: something lacks, and nobody allowed less. Exit status 3.

    ``lacks``: what; ``details``: all but the first, which the message names, one a line. ``manifest``: the
    checkpoint that was made all the same; ``report``: what a restore, which is undone, brought back.
    """

    status = 3
    travels: ClassVar[dict[str, Any]] = {
        "lacks": tuple[Lack, ...], "manifest": CheckpointManifest | None, "report": RestoreReport | None
    }  # fmt: skip

    def __init__(
        self,
        message: str,
        lacks: Sequence[Lack] = (),
        *,
        manifest: CheckpointManifest | None = None,
        report: RestoreReport | None = None,
    ) -> None:
        super().__init__(message, "\n".join(map(str, lacks[1:])))
        self.lacks = tuple(lacks)
        self.manifest = manifest
        self.report = report


def disk_full(error: BaseException | None) -> bool:
    """Whether it comes of a disk, or a bound of one, that is full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__
    return False


class PartError(HostError):
    """What a part refused, in a sentence; nothing is left half done."""


class MachineError(PartError):
    """The machine or the sandbox's processes did not do what was asked."""


class PoolError(PartError):
    """The file systems of the sandboxes cannot do what was asked."""


class InspectError(PartError):
    """The inspector cannot work here, or not any more."""


class CriuError(PartError):
    """CRIU is missing, refused or failed. ``details`` holds the lines of its log that say so.

    ``interrupted``: it ended while it read connections, and what has them may have run before they were whole
    again.
    """

    interrupted = False
