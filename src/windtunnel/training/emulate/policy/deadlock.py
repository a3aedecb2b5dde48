"""The error of a job that would hang, and small words that all its messages use."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from windtunnel.base.errors import ScriptError
from windtunnel.training.emulate.graph import Collective, EventKind, Slice


class Deadlock(ScriptError):
    """The ranks of the user's program do not meet: it would hang on a real cluster. Exit status 1."""


def call_site(slice_: Slice, event: int) -> str:
    """Where in the user's script event number ``event`` was called from, ``"train.py:88"``; "" if unknown."""
    calls = np.flatnonzero(slice_.events["kind"][: event + 1] == EventKind.CALL)
    if not len(calls):
        return ""
    row = int(slice_.events["ref"][calls[-1]])
    return slice_.call_sites[row] if 0 <= row < len(slice_.call_sites) else ""


def at(slice_: Slice, event: int) -> str:
    """``" at train.py:88"``, or nothing where the call site is unknown."""
    site = call_site(slice_, event)
    return f" at {site}" if site else ""


def ranges(ranks: Iterable[int], most: int = 4) -> str:
    """``"0-3, 8, 12-15"``; after ``most`` ranges the rest is told by its number."""
    ordered = np.unique(np.fromiter(ranks, np.int64))
    if not len(ordered):
        return "none"
    breaks = np.flatnonzero(np.diff(ordered) != 1)
    firsts = ordered[np.concatenate([[0], breaks + 1])]
    lasts = ordered[np.concatenate([breaks, [len(ordered) - 1]])]
    pairs = list(zip(firsts.tolist(), lasts.tolist(), strict=True))
    words = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in pairs[:most])
    rest = sum(b - a + 1 for a, b in pairs[most:])
    return f"{words} and {rest} more" if rest else words


def ranks_words(ranks: Iterable[int], most: int = 4) -> str:
    """``"rank 3"`` or ``"ranks 0-2, 7"``."""
    listed = list(ranks)
    return f"{'rank' if len(listed) == 1 else 'ranks'} {ranges(listed, most)}"


def call_words(row: Collective) -> str:
    """What a call is, for a message: kind, bytes and dtype."""
    nbytes = max(row.in_bytes, row.out_bytes)
    return f"{row.kind} of {nbytes} bytes ({row.dtype})" if nbytes else row.kind
