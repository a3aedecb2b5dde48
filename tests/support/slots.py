"""What a slot of a checkpoint in memory says, read from outside."""

from __future__ import annotations

from pathlib import Path

from windtunnel.training.checkpoint.live.slot import HEADER, SIZE, Header


def read_header(path: Path) -> Header | None:
    """What the slot at ``path`` says; None where it is no slot or its header is not whole."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    header = Header.unpacked(content[:SIZE])
    return header if header is not None and HEADER + header.capacity == len(content) else None
