"""What the converters share: their result, drawn think times, names, and the stand-in for a repository.

A recorded session works on a repository that is not there. Its outputs show parts of it: windows of files
with line numbers, and files printed whole. From these the prelude writes a *stand-in*: the lines that were
seen, at their places, and empty lines for all others. So reads and edits do something real, without network;
imports and tests of the absent rest fail, here as they would anywhere.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from random import Random

from windtunnel.agents.sandbox.traces.generate import Think
from windtunnel.agents.sandbox.traces.schema import NAME, Trace, TraceTurn

MOST_LINES = 100_000
"""A recorded window that claims a longer file is not believed."""


@dataclass(frozen=True)
class Converted:
    """A trace, and in words what was guessed, drawn or left out on the way."""

    trace: Trace
    notes: tuple[str, ...]


def name_from(path: Path) -> str:
    """A trace's name from that of a file."""
    words = re.sub(r"[^a-z0-9._-]+", "-", path.name.lower().split(".")[0]).strip("-._")[:64]
    return words if NAME.fullmatch(words) else "recording"


def with_drawn_think(turns: Sequence[TraceTurn], seed: int, think: Think) -> tuple[TraceTurn, ...]:
    """The turns with think times from the log-normal; the last one has none."""
    random = Random(seed)
    drawn = [replace(turn, think=think.draw(random)) for turn in turns[:-1]]
    return (*drawn, *turns[-1:])


class StandIn:
    """Files as a recording shows them, before the session itself changed them."""

    def __init__(self) -> None:
        self._files: dict[str, dict[int, str]] = {}
        self._lengths: dict[str, int] = {}
        self._changed: set[str] = set()

    def saw(self, path: str, lines: Iterable[tuple[int, str]], length: int = 0) -> None:
        """Lines of a file were shown, numbered from 1. Views after the session's own changes do not count."""
        path = _relative(path)
        if not path or path in self._changed or length > MOST_LINES:
            return
        known = self._files.setdefault(path, {})
        for number, line in lines:
            if 0 < number <= MOST_LINES:
                known.setdefault(number, line)
        self._lengths[path] = max(length, self._lengths.get(path, 0), *known, 0)

    def changed(self, path: str) -> None:
        """From now on the session's own text is in the file."""
        self._changed.add(_relative(path))

    def prelude(self) -> str:
        """Shell text that writes the files and commits them; empty when nothing was seen."""
        parts = []
        for path, known in sorted(self._files.items()):
            text = "\n".join(known.get(number, "") for number in range(1, self._lengths[path] + 1))
            parts.append(_written(path, text))
        if parts:
            parts.append("git init -q -b main . && git add -A && git commit -q -m 'stand-in'")
        return "\n".join(parts)

    def __len__(self) -> int:
        return len(self._files)


def _relative(path: str) -> str:
    """The path inside the working directory; empty for one that leads out of it."""
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or "\0" in path:
        return ""
    return "" if str(pure) == "." else str(pure)


def _written(path: str, text: str) -> str:
    end = "END_OF_FILE"
    while end in text:
        end += "_"
    folder = PurePosixPath(path).parent
    make = "" if str(folder) == "." else f"mkdir -p {shlex.quote(str(folder))}\n"
    return f"{make}cat > {shlex.quote(path)} <<'{end}'\n{text}\n{end}"
