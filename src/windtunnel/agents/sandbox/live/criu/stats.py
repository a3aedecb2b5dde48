"""CRIU's own statistics: the two small files that it leaves beside its log.

A file is two magic numbers, a length and one protobuf message whose fields are all unsigned varints, so forty
lines read it without generated code. Field numbers: CRIU, images/stats.proto.
"""

from __future__ import annotations

import struct
from pathlib import Path

DUMP = {
    1: "freezing_us",
    2: "frozen_us",
    3: "memdump_us",
    4: "memwrite_us",
    5: "pages_scanned",
    7: "pages_written",
    9: "pages_lazy",
    12: "shared_pages_scanned",
    14: "shared_pages_written",
}
RESTORE = {1: "pages_compared", 2: "pages_skipped", 3: "forking_us", 4: "restore_us", 5: "pages_restored"}


def read_stats(file: Path) -> dict[str, int]:
    """The counters of a ``stats-dump`` or ``stats-restore`` file by name; empty when it cannot be read."""
    try:
        content = file.read_bytes()
        (length,) = struct.unpack_from("<I", content, 8)
        key, body = _varint(content[12 : 12 + length])
        size, body = _varint(body)
        body = body[:size]
        names = DUMP if key >> 3 == 1 else RESTORE
        found = {}
        while body:
            key, body = _varint(body)
            value, body = _varint(body)
            if key >> 3 in names:
                found[names[key >> 3]] = value
    except (OSError, struct.error, IndexError):
        return {}
    return found


def _varint(content: bytes) -> tuple[int, bytes]:
    value = 0
    for place in range(10):
        byte = content[place]
        value |= (byte & 127) << (7 * place)
        if byte < 128:
            return value, content[place + 1 :]
    raise IndexError("a varint has at most ten bytes")
