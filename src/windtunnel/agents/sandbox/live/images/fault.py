"""The fault of this part, and the names it accepts."""

from __future__ import annotations

import re

from windtunnel.base.atomic import PART
from windtunnel.base.errors import HostError

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")


class ImageError(HostError):
    """An image, manifest or export is damaged, missing or cannot be written; the message names which."""


def checked_id(id: str) -> str:
    """``id``, or ImageError: it becomes the name of files."""
    if not _ID.fullmatch(id) or id.endswith(PART):
        raise ImageError(f"checkpoint id {id!r} cannot name a file")
    return id
