"""The one fault of this part."""

from __future__ import annotations

from windtunnel.base.errors import HostError


class PoolError(HostError):
    """The file systems of the sandboxes cannot do what was asked; the message says why, and nothing is
    half done."""
