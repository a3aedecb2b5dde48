"""Recordings of other projects as traces: SWE-agent, mini-SWE-agent, asciicast.

What a recording says is kept; what had to be guessed or left out is told in ``Converted.notes``. Expected
outputs are *not* taken over: they are those of another machine. ``replay.recorded`` fills in those of a
fault-free run here.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from windtunnel.agents.sandbox.traces.convert.cast import from_cast
from windtunnel.agents.sandbox.traces.convert.mini import from_mini
from windtunnel.agents.sandbox.traces.convert.parts import Converted
from windtunnel.agents.sandbox.traces.convert.sweagent import from_sweagent
from windtunnel.agents.sandbox.traces.generate import Think
from windtunnel.base.errors import UserError

__all__ = ["Converted", "convert"]

MOST_BYTES = 256 * 2**20
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
"""JSON can hold halves of characters, and bytes that are no UTF-8 are read as such; no shell text can."""


def convert(
    path: Path,
    *,
    name: str = "",
    source: str = "",
    licence: str = "unknown",
    workdir: str = "/workspace",
    seed: int = 0,
    think: Think | None = None,
) -> Converted:
    """The trace that a recording holds. ``think`` and ``seed``: for recordings without times."""
    text = _read(path)
    think = think or Think()
    try:
        data: Any = json.loads(text)
    except json.JSONDecodeError as fault:
        data = None
        first = text.split("\n", 1)[0]
        if '"version"' not in first:
            raise UserError(
                f"{path}: not JSON ({fault}); accepted are a SWE-agent .traj, a mini-SWE-agent "
                "trajectory, and an asciicast of version 2 or 3"
            ) from fault
    except RecursionError as fault:
        raise UserError(f"{path}: the JSON is nested too deeply to be a recording") from fault
    if data is None or (isinstance(data, dict) and "version" in data and "width" in data):
        found = from_cast(path, text, workdir)
    elif isinstance(data, dict) and ("trajectory" in data or "history" in data):
        found = from_sweagent(path, data, workdir, seed, think)
    elif isinstance(data, list) or (isinstance(data, dict) and "messages" in data):
        found = from_mini(path, data, workdir, seed, think)
    else:
        raise UserError(
            f"{path}: no recording that is known; a SWE-agent file has the field trajectory or history, a "
            "mini-SWE-agent file is a list of messages or has the field messages"
        )
    if not found.trace.turns:
        raise UserError(f"{path}: the recording holds no command that could be taken over")
    trace = replace(
        found.trace,
        prelude=LONE_SURROGATE.sub("\ufffd", found.trace.prelude),
        turns=tuple(
            replace(turn, command=LONE_SURROGATE.sub("\ufffd", turn.command)) for turn in found.trace.turns
        ),
    )
    named = replace(trace, name=name or trace.name, source=source or trace.source, licence=licence)
    return replace(found, trace=named)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as fault:
        raise UserError(f"{path}: the recording cannot be read: {fault.strerror}") from fault
    if len(data) > MOST_BYTES:
        raise UserError(f"{path}: the recording is larger than {MOST_BYTES >> 20} MiB")
    return data.decode("utf-8", "surrogateescape")
