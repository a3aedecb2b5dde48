"""The upstream's API key: on the host alone, read at each request, put into the header that is spoken.

So it can be changed while sandboxes run, and is never in a sandbox, a manifest, a log or an export. Whatever
credential the agent's client sends, a dummy mostly, is dropped.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from windtunnel.base.errors import UserError

CREDENTIALS = frozenset({"authorization", "x-api-key", "api-key", "x-goog-api-key"})
"""Headers in which model APIs take a key."""
LARGEST = 16 * 1024
VALUE = re.compile(r"[\x21-\x7e]+")
HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+): *([\x21-\x7e][\x20-\x7e]*)")


def read_key(file: Path) -> str:
    """The one line of ``file``. Raises UserError, without a word of what it holds, unless it is a file that
    only this process's user may read."""
    try:
        # without O_NONBLOCK, opening a FIFO would wait for its writer
        with open(os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as opened:
            status = os.fstat(opened.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UserError(f"model proxy: key file {file} is not a regular file")
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise UserError(
                    f"model proxy: key file {file} must belong to user {os.geteuid()}, the daemon's, and "
                    "be readable by nobody else; chown it, and chmod 600"
                )
            text = opened.read(LARGEST + 1).decode("ascii").strip()
    except UnicodeDecodeError:
        text = ""
    except OSError as error:
        raise UserError(f"model proxy: key file {file} cannot be read: {error.strerror}") from None
    if len(text) > LARGEST or (not VALUE.fullmatch(text) and not HEADER.fullmatch(text)):
        raise UserError(
            f"model proxy: key file {file} must hold one line: a key, or a header as 'Name: value'"
        )
    return text


def key_header(key: str, route: str, given: frozenset[str]) -> tuple[str, str]:
    """The header that tells ``key``: as the file says; or as the API does, which is told by the path and by
    the headers that the client has ``given``: ``x-api-key`` (Anthropic), ``api-key`` (Azure), else a bearer
    token (OpenAI and those that speak like it)."""
    header = HEADER.fullmatch(key)
    if header:
        return header[1].lower(), header[2]
    if "anthropic-version" in given or re.search(r"/messages(/|$)", route):
        return "x-api-key", key
    if "api-key" in given:
        return "api-key", key
    return "authorization", f"Bearer {key}"
