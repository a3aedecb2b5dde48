"""Who gets which split, when an epoch is over for a trainer, and how many workers there should be.

Splits. A client (a trainer's rank, or one of its loader's processes) asks for a split whenever it can take
one more. It gets the first that is left in the epoch's order: so one that came back from a client that is
gone goes before those not begun, and never holds up the epoch's end. It is read by the worker with the fewest
splits; no worker has more than ``slots``, but for a client that has no split, or lost the worker of one:
those in step with it do not go on with theirs before. Clients share the workers evenly, and the last splits
go to clients that have none. What has been sent whole counts no more, consumed or not: how much of that a
client lets lie ready is its own matter.

Ahead. A client for which nothing is left may read the first splits of the next epoch ahead, as many as it may
have at a time. They are not its own by that: it asks for them when that epoch has begun, and gets those that
it has read, unless others ran out of all else before.

The end. Ranks that train together must take equally many steps. ``ends`` says how: with ``pad`` a rank that
has run dry takes its last batch again as often as another one is ahead of it, as `DistributedSampler` does;
with ``drop`` each may begin as many steps as every rank has batches for, in hand or behind it, and all end
once nothing is left to be given out and the one that has fewest gets no more: what others have beyond that is
dropped; with ``uneven`` each ends when all is consumed.

Faults. A split that a worker could not read is tried by `TRIES` workers, by one where the error is of the
data; then it is left out (``on_error`` is skip), or the session fails. So it fails after as many workers in a
row that ended before they served.

Workers. Demand D is what is consumed a second, over the share of time in which trainers are not stalled;
capacity mu is what a worker makes in a busy second; both are smoothed. There should be ceil(1.1 D / mu)
workers, and one more than there are where trainers were stalled in a period in which all workers were busy:
more at once, but at most twice as many, and no more before those have had the time to start; one less at a
time, only while buffers are full and workers idle.

Source: Zhao et al., Understanding data storage and ingestion for large-scale deep recommendation model
training (DPP), ISCA 2022, the section on the master's control loop; its rule of scaling is not printed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

HEADROOM = 1.1
KEPT = 0.8
"""What is left after a period of what is remembered of those before it."""
STALLED = 0.01
"""Share of stalls up to which there is nothing to mend."""
SATURATED = 0.6
"""Share of a period for which workers were busy from which on they may be what is waited for: sending is not
counted. Measured: those that are all that is waited for are busy for 0.75 to 0.9 of the time, one that is so
now and then for less."""
TRIES = 3
"""Workers that may fail to read a split, or to start, before it is given up."""
MOST_STALLED = 0.9
"""A share of stalls above this says no more about demand: the trainer would have taken ten times as much."""


@dataclass(frozen=True)
class ScalingBounds:
    """Bounds, and when to go down: buffers fuller than ``high`` and workers busy for less than ``idle``.
    ``start``: seconds until a new worker gives its first batch; ``cooldown``: seconds from one change to the
    next way down."""

    least: int = 1
    most: int = 4
    high: float = 0.7
    idle: float = 0.6
    start: float = 3.0
    cooldown: float = 10.0


@dataclass(frozen=True)
class LoadHistory:
    """Sums over periods, of which older ones count less: seconds, batches taken, seconds that trainers were
    stalled, batches made, seconds that workers were busy."""

    seconds: float = 0.0
    consumed: float = 0.0
    stalled: float = 0.0
    produced: float = 0.0
    busy: float = 0.0

    @property
    def starved(self) -> float:
        """The share of time that trainers were stalled."""
        return self.stalled / self.seconds if self.seconds else 0.0

    @property
    def demand(self) -> float:
        """D: batches a second that trainers would take if they never waited."""
        return self.consumed / self.seconds / (1 - min(self.starved, MOST_STALLED)) if self.seconds else 0.0

    @property
    def capacity(self) -> float:
        """mu: batches that a worker makes in a busy second."""
        return self.produced / self.busy if self.busy else 0.0


@dataclass(frozen=True)
class PoolLoad:
    """What was seen in a period, and what was known before.

    ``period``: seconds. ``consumed``: batches taken by all clients. ``stalled``: share of the clients' time
    that went by waiting for a batch. ``buffered``: share of the clients' buffers that is full. ``produced``:
    batches made by all workers, in ``busy`` seconds of theirs. ``workers``: those wanted now; ``ready``:
    those that serve. ``up``, ``down``: seconds since the last change of either kind. ``memory``: of the
    periods before, as decided last."""

    settings: ScalingBounds
    period: float
    consumed: int
    stalled: float
    buffered: float
    produced: int
    busy: float
    workers: int
    ready: int
    up: float
    down: float
    memory: LoadHistory = LoadHistory()


@dataclass(frozen=True)
class SplitWorker:
    """``splits``: that it serves now."""

    name: str
    splits: int = 0


@dataclass(frozen=True)
class PeerClient:
    """Another client of the epoch. ``steps``: batches it was given to train with; ``ready``: those it has
    beside these. ``dry``: it has none, nor a split, and wants one. ``ended``: its epoch is over."""

    steps: int
    ready: int = 0
    splits: int = 0
    dry: bool = False
    ended: bool = False


@dataclass(frozen=True)
class SplitRequest:
    """A client wants a split (``reading``: those it is sent now), or to know whether it may go on.

    ``clients``: how many have come, of the ``world`` that must. ``split``: the first that is left; ``own``:
    the first of those that the client has read ahead or nobody has, -1 where there is none; ``left``: how
    many are. ``open``: splits that are not consumed to their end. ``last``: the worker that just failed the
    client, to be had only where there is no other. ``sender``: the worker that sends ``own`` already, as it
    was read ahead. ``after``: the first split of the next epoch that nobody reads ahead, -1 where there is
    none; ``ahead``: how many this client does."""

    ends: str
    world: int
    clients: int
    reading: int
    steps: int
    dry: bool
    split: int
    left: int
    open: int
    workers: tuple[SplitWorker, ...]
    peers: tuple[PeerClient, ...] = ()
    slots: int = 2
    last: str = ""
    sender: str = ""
    after: int = -1
    ahead: int = 0
    own: int = -1


@dataclass(frozen=True)
class RankProgress:
    """Of ranks that end together (``drop``), of which ``world`` must be here. ``batches``: that each has been
    given, handed out or ready; ``settled``: whether it has all of its splits, to their last batch. ``left``:
    splits that are not given out."""

    world: int
    batches: tuple[int, ...]
    settled: tuple[bool, ...]
    left: int


@dataclass(frozen=True)
class SplitFault:
    """A worker could not read a split, or start, the ``failures``-th time; ``permanent``: any would fail."""

    on_error: str
    permanent: bool
    failures: int


@dataclass(frozen=True)
class WorkerSurplus:
    """There are more ``workers`` than are ``wanted``."""

    workers: tuple[SplitWorker, ...]
    wanted: int


Observation = PoolLoad | SplitRequest | RankProgress | SplitFault | WorkerSurplus


@dataclass(frozen=True)
class PoolSize:
    """How many workers to have; ``memory`` is for the next observation."""

    workers: int
    memory: LoadHistory
    reason: str = field(default="", compare=False)


@dataclass(frozen=True)
class SplitGrant:
    """This split, from this worker."""

    split: int
    worker: str


@dataclass(frozen=True)
class ReadAhead:
    """This split, which is the next epoch's, from this worker: to have its first batches then."""

    split: int
    worker: str


@dataclass(frozen=True)
class WaitForSplit:
    reason: str = field(default="", compare=False)


@dataclass(frozen=True)
class RepeatBatch:
    """Take the last batch again."""


@dataclass(frozen=True)
class EpochEnd:
    """The epoch is over for this client."""


@dataclass(frozen=True)
class StepLimit:
    """Each rank may take ``steps``; ``last``: and then its epoch is over."""

    steps: int
    last: bool = False


@dataclass(frozen=True)
class RetrySplit:
    """By another worker."""


@dataclass(frozen=True)
class GiveUpSplit:
    """``skip``: the split is left out; else the session fails."""

    skip: bool


@dataclass(frozen=True)
class DrainWorkers:
    """These workers end when they send nothing any more."""

    workers: tuple[str, ...]


Decision = (
    PoolSize
    | StepLimit
    | SplitGrant
    | ReadAhead
    | WaitForSplit
    | RepeatBatch
    | EpochEnd
    | RetrySplit
    | GiveUpSplit
    | DrainWorkers
)


def decide(observation: Observation) -> Decision:
    """All rules of the master."""
    match observation:
        case RankProgress():
            return together(observation)
        case PoolLoad():
            return scaled(observation)
        case SplitRequest():
            return answered(observation)
        case SplitFault(on_error, permanent, failures):
            return GiveUpSplit(on_error == "skip") if permanent or failures >= TRIES else RetrySplit()
        case WorkerSurplus(workers, wanted):
            return DrainWorkers(tuple(leaving(workers, wanted)))


def share(workers: int, slots: int, clients: int) -> int:
    """Splits that a client may be sent at a time."""
    return max(1, math.ceil(workers * slots / max(clients, 1)))


def answered(ask: SplitRequest) -> Decision:
    """What a client that asks gets."""
    if ask.clients < ask.world:
        return WaitForSplit(f"{ask.clients} of {ask.world} clients are here")
    others = [peer for peer in ask.peers if not peer.ended]
    most = share(len(ask.workers), ask.slots, len(others) + 1)
    worker = _worker(ask)
    if not ask.left:
        late = _late(ask) if ask.dry else WaitForSplit("none is left")
        if isinstance(late, WaitForSplit) and ask.after >= 0 and ask.ahead < most and worker:
            return ReadAhead(ask.after, worker)
        return late
    empty = sum(not client.splits for client in others)
    if ask.reading and (ask.reading >= most or ask.left <= empty):
        return WaitForSplit("others have fewer")
    if not worker and not ask.reading:
        worker = _worker(ask, full=True)
    split = ask.own if ask.own >= 0 else ask.split
    return SplitGrant(split, worker) if worker else WaitForSplit("no worker is free")


def _worker(ask: SplitRequest, *, full: bool = False) -> str:
    """The one that has sent it already, or has the fewest splits; empty where there is none with room.
    ``full``: without room, too."""
    if any(worker.name == ask.sender for worker in ask.workers):
        return ask.sender
    able = list(ask.workers) if full else [worker for worker in ask.workers if worker.splits < ask.slots]
    able = [worker for worker in able if worker.name != ask.last] or able
    return min(able, key=lambda worker: (worker.splits, len(worker.name), worker.name)).name if able else ""


def _late(ask: SplitRequest) -> Decision:
    """For a client that has run dry, with nothing left to begin."""
    if ask.ends == "drop":
        return WaitForSplit("ranks end together")
    if ask.ends == "uneven":
        return WaitForSplit("others may leave theirs") if ask.open else EpochEnd()
    ahead = any(peer.steps > ask.steps for peer in ask.peers)
    if ahead:
        return RepeatBatch()
    settled = all(peer.dry or peer.ended for peer in ask.peers)
    return EpochEnd() if settled and not ask.open else WaitForSplit("others may have more")


def together(pace: RankProgress) -> StepLimit:
    """No rank begins a step that another one cannot take."""
    if len(pace.batches) < pace.world or not pace.batches:
        return StepLimit(0)
    least = min(pace.batches)
    over = any(batch == least and all_ for batch, all_ in zip(pace.batches, pace.settled, strict=True))
    return StepLimit(least, over and not pace.left)


def scaled(load: PoolLoad) -> PoolSize:
    """How many workers there should be."""
    settings, now = load.settings, _remembered(load)
    target, why = load.workers, "enough"
    if now.consumed and now.produced and now.busy:
        needed = math.ceil(HEADROOM * now.demand / now.capacity)
        if load.stalled > STALLED and _saturated(load):
            latest = load.consumed / load.period / (1 - min(load.stalled, MOST_STALLED))
            needed = max(needed, math.ceil(HEADROOM * latest / now.capacity), load.workers + 1)
        if needed > load.workers and now.starved > STALLED and load.up >= settings.start:
            target, why = min(needed, 2 * load.workers), f"trainers want {now.demand:.3g} batches/s"
        elif needed < load.workers and _idle(load, now):
            target, why = load.workers - 1, "buffers are full and workers idle"
    return PoolSize(min(max(target, settings.least), settings.most), now, why)


def _remembered(load: PoolLoad) -> LoadHistory:
    """Workers decode many rows at once, and give them as batches later: only sums over a while say a rate."""
    new = (load.period, load.consumed, load.stalled * load.period, load.produced, load.busy)
    old = load.memory
    before = (old.seconds, old.consumed, old.stalled, old.produced, old.busy)
    return LoadHistory(*(KEPT * previous + more for previous, more in zip(before, new, strict=True)))


def _saturated(load: PoolLoad) -> bool:
    """Those that were asked for are there, and were busy all the time."""
    return load.ready >= load.workers and load.busy >= SATURATED * load.period * load.ready


def _idle(load: PoolLoad, now: LoadHistory) -> bool:
    settings = load.settings
    rested = min(load.up, load.down) >= settings.cooldown and now.starved <= STALLED
    return (
        rested
        and load.buffered > settings.high
        and now.busy < settings.idle * now.seconds * max(load.ready, 1)
    )


def leaving(workers: Sequence[SplitWorker], target: int) -> list[str]:
    """Who goes where fewer are wanted: those with the fewest splits, of these the youngest."""
    age = sorted(
        workers, key=lambda worker: (worker.splits, -len(worker.name), tuple(-ord(x) for x in worker.name))
    )
    return [worker.name for worker in age[: max(0, len(workers) - target)]]


def keep_size(observation: Observation) -> Decision:
    """The policy of a static pool: workers stay as many as they are."""
    if isinstance(observation, PoolLoad):
        return PoolSize(observation.workers, LoadHistory(), "as many as there are")
    return decide(observation)


POLICIES: Mapping[str, Callable[[Observation], Decision]] = {"starvation": decide, "static": keep_size}
