"""What is decided about files: where the stages of the pipeline run and how wide they are, when writers wait,
who is the primary, and what an `fsync` may promise (LineFS, SOSP 2021, sections 3 and 4).

The rules. *Placement*: in ``linefs`` and ``serial`` the stages run on cores that are set aside (they stand
for the SmartNIC's), in ``host`` (as Assise does it) on those of the applications. *Width*: the stage that
works on several chunks at once (compress) gets one thread more where over half of its queue waits, one less
where none does. *Watermarks*: writers wait while more of the ring is in use than the high mark, until less is
than the low one; the paper's slabs have 60 and 50 %. *Failover*: when the primary has said nothing for a
lease, that host takes over which has most of the log (all have what was acknowledged), the first of the chain
where several do. *Promise*: an `fsync` returns when all hosts of the epoch have it on their disks, if they
are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, overload

from windtunnel.data.files.model import Mode

STAGES = ("fetch", "validate", "publish", "compress", "transfer", "acknowledge")
LEASE = 2.0
"""Seconds without a word after which a host counts as gone (LineFS: 1 s, on hosts that share nothing)."""
HIGH, LOW = 0.6, 0.5
WIDEST = 4


@dataclass(frozen=True)
class PipelineLoad:
    """``cores``: that are set aside. ``queued``: share of the queue before the stage of ``width`` threads
    that waits, 0 to 1. ``used``: share of the ring. ``waiting``: whether writers wait already."""

    mode: Mode
    cores: tuple[int, ...] = ()
    queued: float = 0.0
    width: int = 1
    used: float = 0.0
    waiting: bool = False


@dataclass(frozen=True)
class PipelineSchedule:
    """``cores``: on which the stages run; () for all. ``pipelined``: each stage beside the others. ``width``:
    threads that compress. ``wait``: whether writers do."""

    cores: tuple[int, ...]
    pipelined: bool
    width: int
    wait: bool


@dataclass(frozen=True)
class ChainPeer:
    """Another host of the chain, as it was last heard of. ``silent``: seconds since then. ``written``: the
    sequence number behind the last whole frame of its log. ``epoch``: the newest that it knows. ``leads``: it
    does what a primary does. ``able``: its server answers."""

    name: str
    silent: float
    written: int
    epoch: int
    leads: bool
    able: bool


@dataclass(frozen=True)
class ChainView:
    """What the host ``me`` knows of the chain of an ``epoch``. ``least``: hosts without which no fsync
    returns. ``leads``: it does what a primary does. ``broken``: an operation of the group has failed.
    ``joining``: a host that is to be taken in, or ""."""

    me: str
    written: int
    epoch: int
    chain: tuple[str, ...]
    peers: tuple[ChainPeer, ...]
    least: int
    leads: bool
    able: bool
    broken: bool = False
    joining: str = ""


@dataclass(frozen=True)
class ChainChange:
    """``act``: "keep" the epoch; "change" it, to ``epoch`` with ``chain``, whose first is the primary; "read"
    a newer one from the store. ``promise``: whether an fsync may return in this chain."""

    act: str
    epoch: int
    chain: tuple[str, ...]
    promise: bool


Observation = PipelineLoad | ChainView
Decision = PipelineSchedule | ChainChange


@overload
def decide(observation: PipelineLoad) -> PipelineSchedule: ...


@overload
def decide(observation: ChainView) -> ChainChange: ...


def decide(observation: Observation) -> Decision:
    """All rules of this capability."""
    return _flow(observation) if isinstance(observation, PipelineLoad) else _chain(observation)


def _flow(pipeline: PipelineLoad) -> PipelineSchedule:
    pipelined = pipeline.mode != "serial"
    wider = 1 if pipeline.queued > 0.5 else -1 if pipeline.queued == 0.0 else 0
    width = min(WIDEST, max(1, pipeline.width + wider)) if pipelined else 1
    wait = pipeline.used > (LOW if pipeline.waiting else HIGH)
    return PipelineSchedule(() if pipeline.mode == "host" else pipeline.cores, pipelined, width, wait)


def _chain(membership: ChainView) -> ChainChange:
    alive = {peer.name: peer for peer in membership.peers if peer.silent <= LEASE}
    keep = ChainChange("keep", membership.epoch, membership.chain, len(membership.chain) >= membership.least)
    if (
        max((peer.epoch for peer in alive.values()), default=0) > membership.epoch
        or membership.me not in membership.chain
    ):
        return ChainChange("read", membership.epoch, membership.chain, False)
    rest = tuple(name for name in membership.chain if name == membership.me or name in alive)
    first = membership.chain[0]
    if first == membership.me and membership.leads:
        joining = (membership.joining,) if membership.joining else ()
        chain = (*(name for name in rest if name not in joining), *joining)
        return (
            _changed(membership, chain) if chain != membership.chain or membership.broken or joining else keep
        )
    if first in alive and alive[first].leads:
        return keep
    able = {name: membership.able if name == membership.me else alive[name].able for name in rest}
    # whoever led may have more than was passed on: where another takes over, it comes back as one that is new
    rest = tuple(name for name in rest if name != first or able[name])
    written = {name: membership.written if name == membership.me else alive[name].written for name in rest}
    best = max((name for name in rest if able[name]), key=lambda name: written[name], default="")
    return (
        keep
        if best != membership.me
        else _changed(membership, (best, *(name for name in rest if name != best)))
    )


def _changed(membership: ChainView, chain: tuple[str, ...]) -> ChainChange:
    return ChainChange("change", membership.epoch + 1, chain, len(chain) >= membership.least)


POLICIES: Mapping[str, Callable[[Any], Decision]] = {"linefs": decide}
