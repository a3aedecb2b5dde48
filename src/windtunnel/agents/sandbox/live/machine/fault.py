"""The fault that this part reports."""

from __future__ import annotations


class MachineError(Exception):
    """What the machine or the sandbox refused, in a sentence; nothing is left half done."""
