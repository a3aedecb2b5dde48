"""The whole world as a job for the replay engine, with one simulated rank for each *colour*.

Ranks of one class that also have alike peers, all the way round, do everything at the same instants. Colour
refinement finds them: a rank's first colour is its class, its slowness and what its groups cross; then it is
refined until ranks of one colour meet the same colours in every group and at both ends of every message. The
quotient has one rank a colour, and one join for all groups in which the same colours meet: a job of 8,192
ranks is often 16, and the times of every rank are exactly those of its colour.

Parts may be slower than they should be (``--slow host=3:1.3``, ``rank=17:1.5``, ``link=host3:4``).
``host=H:F``: the devices and the host threads of host H take F times as long. ``rank=R:F``: the device of
rank R takes F times as long. ``link=hostH:F``, or ``nic=H:F``: the NICs of host H have 1/F of their
bandwidth, so that every collective or message which leaves or enters that host takes F times as long.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.errors import UserError
from windtunnel.cluster.model import Cluster, GroupPlacement
from windtunnel.engines.replay import ReplayJob, colour
from windtunnel.training.emulate.graph import Collective, Group
from windtunnel.training.emulate.policy.groups import COLLECTIVE, RECV, SEND, Channel, Family
from windtunnel.training.emulate.policy.stitch import StitchedWorld
from windtunnel.training.emulate.twin.program import StepProgram

Longs = NDArray[np.int64]
Floats = NDArray[np.float64]
CollectiveSeconds = Callable[[Collective, Group], float]


@dataclass(frozen=True)
class Crossing:
    """What the groups of a channel cross.

    ``key[rank]`` numbers the distinct crossings of a rank's group (or of the pair that its message joins), -1
    for none. ``sample[key]`` is one such group, ``factor[key]`` how much slower its links are.
    """

    key: Longs
    sample: list[Group]
    factor: list[float]


class JobCall(NamedTuple):
    """A call of a class's step: its ``number`` there, what it is, and where it meets others."""

    number: int
    row: Collective
    channel: Channel
    family: Family

    @property
    def is_message(self) -> bool:
        return self.channel[1] != COLLECTIVE

    def ranks(self, rank: int) -> tuple[int, ...]:
        """Who meets in the call of ``rank``: its group, in order; of a message its sender and receiver."""
        if not self.is_message:
            return tuple(self.family.group(rank).tolist())
        peer = self.family.peer(rank, self.channel[2])
        return (rank, peer) if self.channel[1] == SEND else (peer, rank)


@dataclass(frozen=True)
class WorldJob:
    """A job, and how it maps to the world.

    ``replay``: one simulated rank a colour. ``colour[rank]``; ``leader[colour]``: its lowest rank;
    ``programs[class]``. ``join_call[j]``: the class and the number (in the class's steady calls) of one of
    the calls of join j. ``pipelined``: messages go between ranks of different classes.
    """

    world: StitchedWorld
    replay: ReplayJob
    colour: Longs
    leader: Longs
    programs: list[StepProgram]
    join_call: NDArray[np.int64]
    pipelined: bool

    @cached_property
    def members(self) -> tuple[Longs, Longs, Longs]:
        """For each join its members: (start of each join's in the other two, colours, nodes)."""
        job = self.replay
        order = np.argsort(job.rank_join, kind="stable")
        ptr = np.concatenate([[0], np.cumsum(np.bincount(job.rank_join, minlength=len(job.join_size)))])
        owner = np.repeat(np.arange(job.ranks), np.diff(job.rank_join_ptr))
        nodes = np.concatenate([job.join_nodes[program] for program in job.rank_program])
        return ptr, owner[order], nodes[order]

    def class_of(self, colour: int) -> int:
        return int(self.replay.rank_program[colour])

    def call(self, row: int, number: int) -> JobCall:
        """Of class ``row``, the call of that number; numbers go on through the copies of the step."""
        calls = self.world.calls[row]
        number %= len(calls.event)
        channel = calls.channel(number)
        return JobCall(number, calls.collective(number), channel, self.world.family(channel))

    def call_at(self, row: int, node: int) -> JobCall:
        """Of class ``row``, the call that a join node of its program is."""
        return self.call(row, int(self.programs[row].program.join[node]))


def build(
    world: StitchedWorld, cluster: Cluster, programs: list[StepProgram],
    collective_seconds: CollectiveSeconds, slow: Slowness, *, jitter: float = 0.0, seed: int = 0,
    every_rank: bool = False, apart: Sequence[int] = (),
) -> WorldJob:  # fmt: skip
    """Make the job of ``world`` on ``cluster``.

    ``collective_seconds(row, group)``: seconds of a collective of ``group``; of a message, ``group`` is the
    pair (sender, receiver). ``every_rank``: simulate each rank by itself, colours or not. ``apart``: ranks
    that are like no other.
    """
    classes = world.classes
    channels = sorted({channel for calls in world.calls for channel in calls.channels})
    shared = [channel for channel in channels if channel[1] == COLLECTIVE]
    sends = sorted({classes.families.sent(channel) for channel in channels if channel[1] != COLLECTIVE})
    crossings = _crossings(world, cluster, [*shared, *sends], slow)
    if every_rank:
        colours = np.arange(world.size)
    else:
        keys = [classes.rank_class.astype(np.int64), *(crossing.key for crossing in crossings.values())]
        keys += [np.unique(factors, return_inverse=True)[1] for factors in (slow.compute, slow.host)]
        alone = np.zeros(world.size, np.int64)
        alone[list(apart)] = np.arange(1, len(apart) + 1)
        colours = _colours(world, [*keys, alone], shared, sends)
    _, leader, colours = np.unique(colours, return_index=True, return_inverse=True)
    joins = _joins(world, colours, leader, crossings, collective_seconds, programs[0].copies)
    return WorldJob(
        world=world,
        replay=ReplayJob(
            programs=[program.program for program in programs],
            rank_program=classes.rank_class[leader].astype(np.int32),
            compute_scale=slow.compute[leader],
            issue_scale=slow.host[leader],
            rank_join_ptr=np.concatenate([[0], np.cumsum([len(part) for part in joins.of_rank])]),
            rank_join=np.concatenate([np.zeros(0, np.int64), *joins.of_rank]),
            join_size=np.concatenate([np.zeros(0, np.int32), *joins.size]),
            join_duration=np.concatenate([np.zeros(0), *joins.duration]),
            jitter=jitter,
            seed=seed,
        ),
        colour=colours.astype(np.int64),
        leader=leader,
        programs=programs,
        join_call=np.concatenate([np.zeros((0, 2), np.int64), *joins.call]),
        pipelined=any(_between_parts(world, send) for send in sends),
    )


def _between_parts(world: StitchedWorld, send: Channel) -> bool:
    members = world.family(send).members
    row = world.classes.rank_class
    return bool((row[members] != row[np.roll(members, -send[2], axis=1)]).any())


def _crossings(
    world: StitchedWorld, cluster: Cluster, channels: Sequence[Channel], slow: Slowness
) -> dict[Channel, Crossing]:
    crossings: dict[tuple[int, ...], tuple[GroupPlacement, float]] = {}

    def crossing(ranks: tuple[int, ...]) -> tuple[GroupPlacement, float]:
        if ranks not in crossings:
            placement = cluster.placement(ranks)
            hosts = {rank // cluster.devices_per_host for rank in ranks}
            # A link's NICs matter only to what leaves the host.
            factor = max((slow.link[host] for host in hosts), default=1.0) if len(hosts) > 1 else 1.0
            crossings[ranks] = placement, float(factor)
        return crossings[ranks]

    result = {}
    for channel in channels:
        family = world.family(channel)
        if channel[1] == COLLECTIVE:
            rows, of_row = family.members, family.group_of.astype(np.int64)
        else:
            rows = np.stack([family.members, np.roll(family.members, -channel[2], axis=1)], -1).reshape(-1, 2)
            of_row = np.full(world.size, -1, np.int64)
            of_row[rows[:, 0]] = np.arange(len(rows))
        numbers: dict[tuple[GroupPlacement, float], int] = {}
        samples: list[Group] = []
        key_of_row = np.empty(len(rows) + 1, np.int64)
        key_of_row[-1] = -1
        for row, ranks in enumerate(map(tuple, rows.tolist())):
            kind = crossing(tuple(dict.fromkeys(ranks)))
            key_of_row[row] = numbers.setdefault(kind, len(numbers))
            if len(numbers) > len(samples):
                samples.append(Group("", ranks, family.label))
        result[channel] = Crossing(key_of_row[of_row], samples, [factor for _, factor in numbers])
    return result


def _colours(
    world: StitchedWorld, keys: list[Longs], shared: Sequence[Channel], sends: Sequence[Channel]
) -> Longs:
    """Refine the ranks' keys over the groups of all channels and the pairs of all messages."""
    everyone = np.arange(world.size)
    slots: list[Longs] = [everyone]  # a group of each rank's own, also used where it is outside a family
    count = world.size
    for channel in [*shared, *sends]:
        _, direction, distance = channel
        family = world.family(channel)
        inside = family.group_of >= 0
        if direction == COLLECTIVE:
            slots.append(np.where(inside, count + family.group_of, everyone))
            count += len(family.members)
            continue
        # The pair of a message is named by its sender: a slot for the rank's own, one for what it receives.
        sender = family.group_of * family.size + family.index_of
        from_ = family.group_of * family.size + (family.index_of - distance) % family.size
        slots.append(np.where(inside, count + sender, everyone))
        slots.append(np.where(inside, count + from_, everyone))
        count += family.members.size
    first = np.unique(np.stack(keys, axis=1), axis=0, return_inverse=True)[1].reshape(-1)
    ptr = np.arange(world.size + 1) * len(slots)
    return colour(first.astype(np.int64), ptr, np.stack(slots, axis=1).ravel()).astype(np.int64)


class _Joins(NamedTuple):
    """Of each simulated rank its joins; of all joins, in parts: members, seconds, and one of their calls."""

    of_rank: list[Longs]
    size: list[NDArray[np.int32]]
    duration: list[Floats]
    call: list[Longs]


def _joins(
    world: StitchedWorld, colours: Longs, leader: Longs, crossings: dict[Channel, Crossing],
    collective_seconds: CollectiveSeconds, copies: int,
) -> _Joins:  # fmt: skip
    """Number the joins: the same channel in groups where the same colours meet is one row of joins."""
    joins, count = _Joins([], [], [], []), 0
    places: dict[tuple[Channel, tuple[int, ...]], tuple[int, int]] = {}
    known: dict[tuple[int, int, Channel, int], float] = {}

    def seconds(row: int, number: int, channel: Channel, rank: int) -> float:
        crossing = crossings[channel]
        key = int(crossing.key[rank])
        if (row, number, channel, key) not in known:
            one = collective_seconds(world.calls[row].slice.collectives[number], crossing.sample[key])
            known[row, number, channel, key] = one * crossing.factor[key]
        return known[row, number, channel, key]

    for rank in leader.tolist():
        row = int(world.classes.rank_class[rank])
        calls = world.calls[row]
        of_rank = np.empty((copies, len(calls.event)), np.int64)
        for channel, positions in calls.channels.items():
            family, sent, end = world.family(channel), channel, rank
            if channel[1] == COLLECTIVE:
                meeting = tuple(np.unique(colours[family.group(rank)]).tolist())
            else:  # both ends of a message are of the sender's channel, and of its colour
                sent = world.classes.families.sent(channel)
                end = family.peer(rank, channel[2]) if channel[1] == RECV else rank
                meeting = (int(colours[end]),)
            lasting = [seconds(row, number, sent, end) for number in calls.row[positions].tolist()]
            duration = np.tile(np.array(lasting, np.float64), copies)
            if (sent, meeting) not in places:
                places[sent, meeting] = (count, len(joins.size))
                count += len(duration)
                members = len(meeting) if channel[1] == COLLECTIVE else 2
                joins.size.append(np.full(len(duration), members, np.int32))
                joins.duration.append(duration)
                named = np.stack([np.full(len(positions), row), positions], axis=1)
                joins.call.append(np.tile(named, (copies, 1)))
            first, part = places[sent, meeting]
            # Members of an uneven collective may see other sizes; it lasts as long as its longest.
            np.maximum(joins.duration[part], duration, out=joins.duration[part])
            of_rank[:, positions] = (first + np.arange(len(duration))).reshape(copies, -1)
        joins.of_rank.append(of_rank.ravel())
    return joins


_FORM = re.compile(r"(host|rank|link|nic)=(?:host)?(\d+):([0-9.eE+-]+)")
_ACCEPTED = "accepted are host=3:1.3, rank=17:1.5, link=host3:4 or nic=3:4"


@dataclass(frozen=True, kw_only=True)
class Slow:
    """The host or the rank of this number, or the NICs of this host (``link``), is ``factor`` times slower:
    one of them."""

    factor: float
    host: int | None = None
    rank: int | None = None
    link: int | None = None

    def __post_init__(self) -> None:
        if [self.host, self.rank, self.link].count(None) != 2:
            raise UserError(f"{self!r}: accepted is one of host, rank and link")

    def __str__(self) -> str:
        targets = {"host": self.host, "rank": self.rank, "link": self.link}
        return next(
            f"{what}={number}:{self.factor}" for what, number in targets.items() if number is not None
        )


def parse_slow(slow: str | Slow, cluster: Cluster) -> list[Slow]:
    """Read a value of ``slow``: one or more forms, separated by commas.

    Raises `UserError` for another form, a host or rank that the cluster has not, or a factor that is not a
    finite number greater than zero.
    """
    slows = []
    for part in filter(None, (part.strip() for part in str(slow).split(","))):
        match = _FORM.fullmatch(part)
        if not match or (match[1] == "rank" and "=host" in part):
            raise UserError(f"`slow`: {part!r} is not understood; {_ACCEPTED}")
        what, index = match[1].replace("nic", "link"), int(match[2])
        last = (cluster.world_size if what == "rank" else cluster.hosts) - 1
        if index > last:
            kind = "rank" if what == "rank" else "host"
            raise UserError(f"`slow`: {part!r} names {kind} {index}, cluster {cluster.name} has 0 to {last}")
        try:
            factor = float(match[3])
        except ValueError:
            factor = math.nan
        if not (0 < factor < math.inf):
            raise UserError(f"`slow`: {match[3]!r} in {part!r} is no factor; accepted is a number above 0")
        slows.append(Slow(factor=factor, **{what: index}))  # type: ignore[arg-type]
    return slows


@dataclass(frozen=True)
class Slowness:
    """Factors on time: ``compute[rank]`` of the device, ``host[rank]`` of the host thread, ``link[host]``."""

    compute: Floats
    host: Floats
    link: Floats


def slowness(slow: Sequence[Slow], cluster: Cluster, world_size: int) -> Slowness:
    """The factors of a world that fills the first ``world_size`` devices; several on one thing multiply."""
    host_of = np.arange(world_size) // cluster.devices_per_host
    compute, host = np.ones(world_size), np.ones(world_size)
    link = np.ones(max(cluster.hosts, int(host_of.max(initial=0)) + 1))
    for entry in slow:
        if entry.link is not None:
            link[entry.link] *= entry.factor
            continue
        ranks = np.arange(world_size) == entry.rank if entry.host is None else host_of == entry.host
        compute[ranks] *= entry.factor
        if entry.host is not None or cluster.host.device.kind == "cpu":  # whose operators the host runs
            host[ranks] *= entry.factor
    return Slowness(compute, host, link)
