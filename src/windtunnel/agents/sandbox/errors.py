"""What goes wrong with sandboxes: what their parts report, and what the user is told.

A part's error is caught by the operation that asked the part, which puts everything back and raises a
`SandboxError` that says what became of the sandbox.
"""

from __future__ import annotations

from windtunnel.base.errors import HostError


class SandboxError(HostError):
    """A fault of the machine or of a sandbox, in a sentence; earlier checkpoints are untouched."""


class SandboxDied(SandboxError):
    """The sandbox's processes are gone. A restore brings its newest checkpoint back."""


class PartError(HostError):
    """What a part refused, in a sentence; nothing is left half done."""


class MachineError(PartError):
    """The machine or the sandbox's processes did not do what was asked."""


class PoolError(PartError):
    """The file systems of the sandboxes cannot do what was asked."""


class InspectError(PartError):
    """The inspector cannot work here, or not any more."""


class CriuError(PartError):
    """CRIU is missing, refused or failed. ``details`` holds the lines of its log that say so."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details
