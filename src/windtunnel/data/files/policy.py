"""What is decided about files: where the stages of the pipeline run and how wide they are, when writers wait, who
is the primary, and what an `fsync` may promise (LineFS, SOSP 2021, sections 3 and 4).

The rules. *Placement*: in ``linefs`` and ``serial`` the stages run on cores that are set aside (they stand for
the SmartNIC's), in ``host`` (as Assise does it) on those of the applications. *Width*: the stage that works on
several chunks at once (compress) gets one thread more where over half of its queue waits, one less where none
does. *Watermarks*: writers
wait while more of the ring is in use than the high mark, until less is than the low one; the paper's slabs
have 60 and 50 %. *Failover*: the next of the hosts that answer which has most of the log (all of them have all
that was acknowledged; by the order of the chain where several do) takes over when the primary has said
nothing for a lease. *Promise*: an `fsync` returns when all hosts of the epoch have it on their disks, if they
are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from windtunnel.data.files.model import Mode

STAGES = ("fetch", "validate", "publish", "compress", "transfer", "acknowledge")
LEASE = 1.0
"""Seconds without a word after which a host counts as gone (LineFS, section 3.5)."""
HIGH, LOW = 0.6, 0.5
WIDEST = 4


@dataclass(frozen=True)
class Pipeline:
    """``cores``: that are set aside. ``queued``: share of the queue before the stage of ``width`` threads that
    waits, 0 to 1. ``used``: share of the ring. ``waiting``: whether writers wait already."""

    mode: Mode
    cores: tuple[int, ...] = ()
    queued: float = 0.0
    width: int = 1
    used: float = 0.0
    waiting: bool = False


@dataclass(frozen=True)
class Flow:
    """``cores``: on which the stages run; () for all. ``pipelined``: each stage beside the others. ``width``:
    threads that compress. ``wait``: whether writers do."""

    cores: tuple[int, ...]
    pipelined: bool
    width: int
    wait: bool


@dataclass(frozen=True)
class Peer:
    """Another host of the chain, as it was last heard of. ``silent``: seconds since then. ``written``: the
    sequence number behind the last whole frame of its log. ``epoch``: the newest that it knows."""

    name: str
    silent: float
    written: int
    epoch: int


@dataclass(frozen=True)
class Membership:
    """What the host ``me`` knows of the chain of an ``epoch``. ``copies``: hosts that were asked for.
    ``broken``: an operation of the group has failed. ``least``: hosts without which no fsync returns."""

    me: str
    written: int
    epoch: int
    chain: tuple[str, ...]
    peers: tuple[Peer, ...]
    copies: int
    least: int
    broken: bool = False


@dataclass(frozen=True)
class Chain:
    """``act``: "keep" the epoch; "change" it (to ``epoch`` with ``chain``, whose first is the primary); or
    "leave": another epoch is on its way, of which this host is not the primary. ``promise``: whether an fsync
    may return in this chain."""

    act: str
    epoch: int
    chain: tuple[str, ...]
    promise: bool


Observation = Pipeline | Membership
Decision = Flow | Chain


def decide(observation: Observation) -> Decision:
    """All rules of this capability."""
    return _flow(observation) if isinstance(observation, Pipeline) else _chain(observation)


def _flow(seen: Pipeline) -> Flow:
    pipelined = seen.mode != "serial"
    wider = 1 if seen.queued > 0.5 else -1 if seen.queued == 0.0 else 0
    width = min(WIDEST, max(1, seen.width + wider)) if pipelined else 1
    wait = seen.used > (LOW if seen.waiting else HIGH)
    return Flow(() if seen.mode == "host" else seen.cores, pipelined, width, wait)


def _chain(seen: Membership) -> Chain:
    alive = {peer.name: peer for peer in seen.peers if peer.silent <= LEASE}
    newer = max((peer.epoch for peer in seen.peers), default=0) > seen.epoch
    enough = len(seen.chain) >= seen.least
    keep = Chain("keep", seen.epoch, seen.chain, enough)
    if newer or seen.me not in seen.chain:
        return Chain("leave", seen.epoch, seen.chain, False)
    rest = tuple(name for name in seen.chain if name == seen.me or name in alive)
    if seen.chain[0] == seen.me:
        if rest == seen.chain and not seen.broken:
            return keep
        return Chain("change", seen.epoch + 1, rest, len(rest) >= seen.least)
    if seen.chain[0] in alive:
        return keep
    written = {name: seen.written if name == seen.me else alive[name].written for name in rest}
    best = max(rest, key=lambda name: (written[name], -rest.index(name)))
    if best != seen.me:
        return keep
    chain = (best, *(name for name in rest if name != best))
    return Chain("change", seen.epoch + 1, chain, len(chain) >= seen.least)


POLICIES: Mapping[str, Callable[[Observation], Decision]] = {"linefs": decide}
