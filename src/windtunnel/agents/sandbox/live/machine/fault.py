"""The fault that this part reports."""

from __future__ import annotations

from windtunnel.base.errors import HostError


class MachineError(HostError):
    """What the machine or the sandbox refused, in a sentence; nothing is left half done."""
