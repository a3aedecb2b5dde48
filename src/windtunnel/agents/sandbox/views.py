"""What a host tells of its sandboxes: the same data from ``Host``, from the daemon, and from its clients."""

from __future__ import annotations

from dataclasses import dataclass

from windtunnel.agents.sandbox.model import FileChange


@dataclass(frozen=True)
class BoxInfo:
    """A sandbox as seen from outside. ``status``: running, dead (its processes are gone) or stopped."""

    name: str
    status: str
    pid: int
    turns: int
    tip: str
    """Its newest checkpoint; empty before the first."""
    image: str
    network: str
    created: float
    processes: tuple[str, ...]
    base: str = ""
    """The checkpoint that it was forked from."""


@dataclass(frozen=True)
class Entry:
    """One name in a folder of a sandbox. ``kind``: file, folder, link or other. ``target`` is where a link
    points."""

    name: str
    kind: str
    size: int
    mode: int = 0
    modified: float = 0.0
    target: str = ""


@dataclass(frozen=True)
class Diff:
    """What differs between two checkpoints: files, and command lines that only the second or only the first
    has."""

    files: tuple[FileChange, ...]
    started: tuple[str, ...]
    ended: tuple[str, ...]


@dataclass(frozen=True)
class RestoreReport:
    """What came back, what did not, and how long it took (seconds)."""

    checkpoint: str
    turn: int
    restored: tuple[str, ...]
    lost: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class GcReport:
    """What a collection dropped, or would drop."""

    checkpoints: tuple[str, ...]
    leftovers: tuple[str, ...]
    bytes_freed: int


@dataclass(frozen=True)
class Event:
    """Something that happened to a sandbox. ``kind``: created, turn, checkpoint, restored, forked, died,
    stopped, removed, failed, collected, or weaker (what the host lacks)."""

    kind: str
    box: str
    detail: str = ""
    seconds: float = 0.0
