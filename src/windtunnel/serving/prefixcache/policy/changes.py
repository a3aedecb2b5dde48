"""What a prefix cache tells: what it found, and what changes in it, for whoever holds the tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Make:
    """A node for the symbols [begin, end) of what was admitted, below ``parent`` (0: the root)."""

    node: int
    parent: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Split:
    """The symbols of ``node`` before depth ``at`` are now those of a new node, ``upper``, between it and its
    parent."""

    node: int
    upper: int
    at: int


@dataclass(frozen=True, slots=True)
class Hold:
    """The state that was copied at ``depth`` belongs to ``node``, which ends there."""

    node: int
    depth: int


@dataclass(frozen=True, slots=True)
class Merge:
    """The KV of ``node`` is put in front of that of ``into``, its only child."""

    node: int
    into: int


@dataclass(frozen=True, slots=True)
class Evict:
    """The node is gone, with all that it held."""

    node: int


@dataclass(frozen=True, slots=True)
class Strip:
    """The state of the node is gone."""

    node: int


Op = Make | Split | Hold | Merge | Evict | Strip
Change = tuple[Op, ...]


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """``depth``: symbols of the prompt that need no computing, with the state of ``node`` (0: none).
    ``matched``: symbols that are known, usable or not. ``keep`` and ``end`` as in `Retention`."""

    depth: int
    node: int
    matched: int
    keep: tuple[int, ...]
    end: int
