"""The one fault of this part."""

from __future__ import annotations


class PoolError(Exception):
    """The file systems of the sandboxes cannot do what was asked; the message says why, and nothing is
    half done."""
