"""What a prefix cache tells: what it found, and what changes in it, for whoever holds the tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tier:
    """A lower tier: what it holds, bytes, and what bringing something back takes: ``latency`` seconds and
    ``bandwidth`` bytes/s. ``rate``: FLOP/s of computing it anew."""

    name: str
    capacity: int
    bandwidth: float
    latency: float
    rate: float


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
    parent; in the first tier, to which ``upper`` moves next if it is not there."""

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
    """The KV of ``gone`` is put in front of that of ``into``, its only child."""

    gone: int
    into: int


@dataclass(frozen=True, slots=True)
class Evict:
    """The node is gone, with all that it held in any tier."""

    node: int


@dataclass(frozen=True, slots=True)
class Strip:
    """The state of the node is gone."""

    node: int


@dataclass(frozen=True, slots=True)
class Move:
    """KV (``what``: "kv") behind those of ``parent`` (0: the root), or the "state" at the node's ``end``,
    move to ``tier`` (0: the first)."""

    node: int
    what: str
    tier: int
    parent: int
    end: int


Op = Make | Split | Hold | Merge | Evict | Strip | Move
Change = tuple[Op, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """``depth``: symbols of the prompt that need no computing, with the state of ``node`` (0: none).
    ``matched``: symbols that are known, usable or not. ``keep`` and ``end`` as in `Keep`. ``path``: the nodes
    from the root to ``node``; their KV up to ``depth`` is used. ``away``: those of them that must be brought
    back by `PrefixCache.restore` first, which takes ``seconds``."""

    depth: int
    node: int
    matched: int
    keep: tuple[int, ...]
    end: int
    path: tuple[int, ...]
    away: tuple[int, ...] = ()
    seconds: float = 0.0
