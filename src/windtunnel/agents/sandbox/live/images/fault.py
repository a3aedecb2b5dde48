"""The fault of this part."""

from __future__ import annotations


class ImageError(Exception):
    """An image, manifest or export is damaged, missing or cannot be written; the message names which."""
