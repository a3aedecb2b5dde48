"""What a process's last words are evidence of: why it ended, and whether it accuses its peers.

What a program prints before it ends need not have to do with its end. Evidence is the traceback of an
uncaught exception (the interpreter prints it, and ends with status 1), and what argparse says before it ends
with status 2; all else is told as a status or a signal alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_BEGIN = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:: .*|:)?")
_USAGE = re.compile(r"\S+: error: .*")
# How gloo says that a peer is gone or silent. Its other errors (sizes that differ) are a program's own.
_OF_PEERS = (
    "connection closed",
    "connection reset",
    "connection refused",
    "pair closure",
    "broken pipe",
    "socket",
    "timed out",
    "timeout",
    "connectfullmesh",
    "connect",
)
_STORES = ("DistNetworkError", "DistStoreError")


def cause_in(lines: Sequence[str], status: int | None) -> str:
    """Why a process that printed ``lines`` to stderr ended with ``status``: the last traceback with its
    exception, or a word of argparse; "" where neither is there."""
    if status == 2:
        return next((line for line in reversed(lines) if _USAGE.fullmatch(line)), "")
    begins = [index for index, line in enumerate(lines) if line == _BEGIN]
    if status != 1 or not begins:
        return ""
    for index in range(begins[-1] + 1, len(lines)):
        if not lines[index].startswith(" "):
            whole = lines[begins[-1] : index + 1]
            return "\n".join(whole) if _EXCEPTION.fullmatch(lines[index]) else ""
    return ""


def blames_peers(error: str) -> bool:
    """Whether an exception, or a traceback that ends with it, says that a peer or the store is gone or
    silent: grounds to suspect the peer, not the program that met it."""
    name, _, text = error.strip().rpartition("\n")[2].partition(": ")
    if name.rpartition(".")[2] in _STORES:
        return True
    low = text.lower()
    if name != "RuntimeError" and not name.endswith("BackendError"):
        return False
    return "nccl" in low or "monitoredbarrier" in low or ("gloo" in low and any(p in low for p in _OF_PEERS))
