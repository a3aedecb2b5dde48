"""Traces of failures: when which hosts are lost, and when hosts come; generated, published, or from a file.

Hosts are numbered 0 .. hosts-1 and keep their number when they are replaced. Failures that have one
cause are one change: a rack takes all of its hosts at once. Times are seconds from the start of the job.

No published trace is copied here: generated ones have the published statistics, and captures are read as the
user has them. A file of our own (``.jsonl``) has the header of `windtunnel.traces.header` with ``hosts`` (so
many are there at first), ``seconds`` and ``replaced`` as in `FailureTrace`, then a line for each change with
the fields of `HostChange`; all but ``time`` may be left out.

- `llama3`: Llama 3 (Meta, 2024, table 5): 419 unexpected interruptions in 54 days on 16,384 GPUs. The printed
  percentages do not all fit the counts; the counts are used. Which cause takes more than one host, or
  leaves its memory alive, is read from its name here, not published.
- `spot`: what Oobleck's artifact (SOSP 2023) has of EC2: P3, 177 hosts added and 167 removed at 79
  instants in 11.4 hours; g4dn, 79 added and 74 removed in 10.6 hours (its instants are not published: one
  removal each).
- `CONTROLLED`: Oobleck's rates: 30 hosts, 15 single removals (`regular`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from windtunnel.base.errors import UserError
from windtunnel.traces.header import TraceHeader, read, write

KIND = "failures"
VERSION = 1


@dataclass(frozen=True)
class HostChange:
    """What happens at ``time``.

    ``lost``: hosts that fail together. ``software``: only their processes end, the hosts and what lies
    in their memory stay. ``joined``: hosts that come of their own accord (spot capacity); where a host
    that was lost is replaced, the one who reads the trace says when. ``cause``: in words.
    """

    time: float
    lost: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    software: bool = False
    cause: str = ""


def poisson(
    hosts: int,
    mtbf: float,
    horizon: float,
    random: np.random.Generator,
    *,
    software: float = 0.0,
    domain_size: int = 1,
    domain_share: float = 0.0,
) -> tuple[HostChange, ...]:
    """Independent failures of a job of ``hosts``, on average one every ``mtbf`` seconds, until
    ``horizon``.

    ``software``: the part of them that leaves the host alive. ``domain_share``: the part of the others
    that takes a whole domain of ``domain_size`` consecutive hosts (a rack, a switch).
    """
    count = int(random.poisson(horizon / mtbf))
    times = np.sort(random.uniform(0.0, horizon, count))
    kinds = random.uniform(0.0, 1.0, (count, 2))
    victims = random.integers(0, hosts, count)
    changes = []
    for time, (kind, wide), victim in zip(times.tolist(), kinds.tolist(), victims.tolist(), strict=True):
        if kind < software:
            changes.append(HostChange(time, (victim,), software=True, cause="software"))
        elif wide < domain_share:
            first = victim - victim % domain_size
            lost = tuple(range(first, min(first + domain_size, hosts)))
            changes.append(HostChange(time, lost, cause="domain"))
        else:
            changes.append(HostChange(time, (victim,), cause="host"))
    return tuple(changes)


def regular(hosts: int, every: float, removals: int, order: Sequence[int] = ()) -> tuple[HostChange, ...]:
    """One host lost every ``every`` seconds, ``removals`` of them, none replaced (Oobleck, section 7.2).

    ``order``: which hosts, else the last ones first.
    """
    victims = order or [hosts - 1 - index for index in range(removals)]
    return tuple(
        HostChange(every * (index + 1), (victims[index],), cause="host") for index in range(removals)
    )


Reach = Literal["host", "domain", "software"]


@dataclass(frozen=True)
class Cause:
    """``count``: how often in the table. ``reach``: one host, all hosts of a domain, or only the
    processes of one host."""

    name: str
    count: int
    reach: Reach = "host"


LLAMA3 = (
    Cause("faulty GPU", 148),
    Cause("GPU HBM3 memory", 72),
    Cause("software bug", 54, "software"),
    Cause("network switch or cable", 35, "domain"),
    Cause("host maintenance", 32),
    Cause("GPU SRAM memory", 19),
    Cause("GPU system processor", 17),
    Cause("network interface", 7),
    Cause("NCCL watchdog timeout", 7, "software"),
    Cause("silent data corruption", 6),
    Cause("GPU thermal interface and sensor", 6),
    Cause("SSD", 3),
    Cause("power supply", 3),
    Cause("server chassis", 2),
    Cause("I/O expansion board", 2),
    Cause("dependency", 2, "software"),
    Cause("CPU", 2),
    Cause("system memory", 2),
)
LLAMA3_SECONDS, LLAMA3_DEVICES = 54 * 86_400.0, 16_384

CONTROLLED = {"6h": 21_600.0, "3h": 10_800.0, "1h": 3600.0, "30m": 1800.0, "10m": 600.0, "5m": 300.0}
"""Seconds between the removals of Oobleck's controlled traces; 15 of them, from 30 hosts."""


@dataclass(frozen=True)
class SpotStatistics:
    """``instants``: at which the removals fell. ``seconds``: length of the capture."""

    added: int
    removed: int
    instants: int
    seconds: float


SPOT = {
    "p3": SpotStatistics(177, 167, 79, 11.4 * 3600),
    "g4dn": SpotStatistics(79, 74, 74, 10.6 * 3600),
}


def llama3(
    hosts: int, horizon: float, random: np.random.Generator, *, per_host: int = 8, domain_size: int = 1
) -> tuple[HostChange, ...]:
    """Failures of a job with ``per_host`` devices in a host, at the rate a device of the table's run.

    ``horizon``: seconds. ``domain_size``: consecutive hosts behind one switch.
    """
    total = sum(cause.count for cause in LLAMA3)
    rate = total / LLAMA3_SECONDS / LLAMA3_DEVICES * hosts * per_host
    times = np.sort(random.uniform(0.0, horizon, int(random.poisson(rate * horizon))))
    kinds = random.choice(len(LLAMA3), len(times), p=[cause.count / total for cause in LLAMA3])
    victims = random.integers(0, hosts, len(times))
    changes = []
    for time, kind, victim in zip(times.tolist(), kinds.tolist(), victims.tolist(), strict=True):
        cause = LLAMA3[kind]
        lost: tuple[int, ...] = (victim,)
        if cause.reach == "domain":
            first = victim - victim % domain_size
            lost = tuple(range(first, min(first + domain_size, hosts)))
        changes.append(HostChange(time, lost, software=cause.reach == "software", cause=cause.name))
    return tuple(changes)


def spot(hosts: int, kind: str, random: np.random.Generator) -> tuple[HostChange, ...]:
    """Removals and additions among ``hosts`` at most, all there at first, as in the capture ``kind``.

    Removals are as clustered as in the capture. What finds no host to remove, or none to add, is left out.

    Raises:
        UserError: no such capture.
    """
    if kind not in SPOT:
        raise UserError(f"spot trace is {kind!r}; accepted are {', '.join(SPOT)}")
    spot_statistics = SPOT[kind]
    instants = random.uniform(0.0, spot_statistics.seconds, spot_statistics.instants)
    sizes = 1 + random.multinomial(
        spot_statistics.removed - spot_statistics.instants,
        [1 / spot_statistics.instants] * spot_statistics.instants,
    )
    arrivals = random.uniform(0.0, spot_statistics.seconds, spot_statistics.added)
    events = [(time, size) for time, size in zip(instants.tolist(), sizes.tolist(), strict=True)]
    events += [(time, 0) for time in arrivals.tolist()]
    there = set(range(hosts))
    changes = []
    for time, size in sorted(events):
        if size:
            lost = random.permutation(sorted(there))[:size].tolist()
            there.difference_update(lost)
            if lost:
                changes.append(HostChange(time, tuple(sorted(lost)), cause="spot"))
        elif len(there) < hosts:
            host = min(set(range(hosts)) - there)
            there.add(host)
            changes.append(HostChange(time, joined=(host,), cause="spot"))
    return tuple(changes)


def read_csv(text: str, name: str) -> tuple[HostChange, ...]:
    """A trace of lines ``milliseconds,add|remove,host``, as Bamboo's and Oobleck's; equal times are one
    change.

    Hosts are numbered in the order in which they first appear. ``name``: of the file, for messages.

    Raises:
        UserError: a line of another form, or a host that is added twice or removed without being there.
    """
    numbers: dict[str, int] = {}
    there: set[str] = set()
    at: dict[float, tuple[list[int], list[int]]] = {}
    for count, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 3 or fields[1] not in ("add", "remove") or not fields[0].isdigit():
            raise UserError(f"{name}, line {count}: {line!r} is not 'milliseconds,add|remove,host'")
        time, what, host = int(fields[0]) / 1000, fields[1], fields[2]
        if (what == "add") == (host in there):
            state = "there already" if what == "add" else "not there"
            raise UserError(f"{name}, line {count}: {what} of host {host!r}, which is {state}")
        number = numbers.setdefault(host, len(numbers))
        lost, joined = at.setdefault(time, ([], []))
        if what == "add":
            there.add(host)
            joined.append(number)
        else:
            there.discard(host)
            lost.append(number)
    return tuple(
        HostChange(time, tuple(lost), tuple(joined), cause="trace")
        for time, (lost, joined) in sorted(at.items())
    )


def read_skypilot(text: str, name: str) -> tuple[HostChange, ...]:
    """A capture of SkyPilot (Wu et al., NSDI 2024): ``{"metadata": {"gap_seconds": 300}, "data": [4, 4, 3,
    ..]}``.

    The counts of hosts do not say which ones go: those with the highest numbers do. ``name``: of the file,
    for messages.

    Raises:
        UserError: the text is something else.
    """
    try:
        body = json.loads(text)
        tick, counts = float(body["metadata"]["gap_seconds"]), body["data"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{name} is no capture with metadata.gap_seconds and data") from error
    if not tick > 0 or not isinstance(counts, list):
        raise UserError(f"{name}: gap_seconds is {tick:g} and must be positive, data must be a list")
    changes = []
    before = 0
    for index, count in enumerate(counts):
        if type(count) is not int or count < 0:
            raise UserError(f"{name}: data[{index}] is {count!r}; a number of hosts is needed")
        if count > before:
            changes.append(HostChange(index * tick, joined=tuple(range(before, count)), cause="trace"))
        elif count < before:
            changes.append(HostChange(index * tick, tuple(range(count, before)), cause="trace"))
        before = count
    return tuple(changes)


NAMED = ("llama3", *(f"spot:{kind}" for kind in SPOT))
"""What `load` takes besides files: generated ones, with the published statistics."""


@dataclass(frozen=True)
class FailureTrace:
    """``seconds``: how long it lasts. ``replaced``: whether hosts come back as the trace says, or (False)
    when whoever simulates it replaces them. ``source``, ``licence``: as in the header of a file."""

    changes: tuple[HostChange, ...]
    seconds: float
    replaced: bool
    source: str = "generated"
    licence: str = ""

    @property
    def losses(self) -> tuple[HostChange, ...]:
        """Changes that take hosts or processes, without those that were never there."""
        return tuple(change for change in self.changes if change.lost and change.time > 0)

    @property
    def mtbf(self) -> float:
        """Mean seconds between losses, infinite if there are none."""
        return self.seconds / len(self.losses) if self.losses else math.inf

    @property
    def software(self) -> float:
        """The part of the losses that leaves the host alive."""
        return sum(change.software for change in self.losses) / max(1, len(self.losses))

    @property
    def wide(self) -> float:
        """The part of the others that takes more than one host."""
        hard = [change for change in self.losses if not change.software]
        return sum(len(change.lost) > 1 for change in hard) / max(1, len(hard))

    @property
    def away(self) -> float:
        """Mean seconds from the loss of a host until one comes into its place, or the trace ends."""
        since: dict[int, float] = {}
        spans = []
        for change in self.changes:
            spans += [change.time - since.pop(place) for place in change.joined if place in since]
            if not change.software:
                since |= dict.fromkeys(change.lost, change.time)
        spans += [self.seconds - begin for begin in since.values()]
        return sum(spans) / max(1, len(spans))


def load(
    name: str,
    hosts: int,
    seconds: float,
    random: np.random.Generator,
    *,
    per_host: int = 8,
    domain_size: int = 1,
) -> FailureTrace:
    """The trace ``name`` (one of `NAMED`, or a file: ``.jsonl`` of `save`, ``.json`` of `read_skypilot`, else
    of `read_csv`) for a job of ``hosts``, cut off after ``seconds``.

    ``per_host``, ``domain_size``: as for `llama3`.

    Raises:
        UserError: neither a known name nor a file that can be read.
    """
    if name == "llama3":
        changes = llama3(hosts, seconds, random, per_host=per_host, domain_size=domain_size)
        return FailureTrace(changes, seconds, replaced=False)
    if name in NAMED:
        kind = name.partition(":")[2]
        trace = FailureTrace(spot(hosts, kind, random), SPOT[kind].seconds, replaced=True)
    elif name.endswith(".jsonl"):
        trace = _saved(Path(name), hosts)
    else:
        changes = seated(_captured(Path(name)), hosts)
        length = max((change.time for change in changes), default=0.0)
        if not length > 0:
            raise UserError(f"trace {name}: nothing happens in it; at least two instants are needed")
        trace = FailureTrace(changes, length, replaced=True, source=f"capture {name}", licence="unknown")
    seconds = min(seconds, trace.seconds)
    within = tuple(change for change in trace.changes if change.time <= seconds)
    return replace(trace, changes=within, seconds=seconds)


def _captured(path: Path) -> tuple[HostChange, ...]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"trace {path}: {error}; accepted are {', '.join(NAMED)}, or a file") from None
    return read_skypilot(text, path.name) if path.suffix == ".json" else read_csv(text, path.name)


def _saved(path: Path, hosts: int) -> FailureTrace:
    """What happens in a file of our own to its first ``hosts``; UserError when it has fewer."""
    header, own, lines = read(path, KIND, VERSION)
    has = own.take("hosts", int)
    if has < hosts:
        raise own.wrong("hosts", has, f"a trace of the job's {hosts} hosts or more")
    seconds = own.number("seconds", None, least=0.001)
    replaced = own.take("replaced", bool)
    own.done()
    there, last = set(range(has)), 0.0
    changes = []
    for line in lines:
        last = line.number("time", None, least=last)
        lost, joined = (line.hosts(name, has) for name in ("lost", "joined"))
        if replaced:
            for name, wrong in (("lost", lost - there), ("joined", joined & there)):
                if wrong:
                    raise line.wrong(
                        name, sorted(wrong), f"hosts that are {'' if name == 'lost' else 'not '}there"
                    )
            there = (there - lost) | joined
        change = HostChange(
            last,
            lost=tuple(sorted(host for host in lost if host < hosts)),
            joined=tuple(sorted(host for host in joined if host < hosts)),
            software=line.take("software", bool, False),
            cause=line.take("cause", str, ""),
        )
        line.done()
        if change.lost or change.joined:
            changes.append(change)
    return FailureTrace(tuple(changes), seconds, replaced, header.source, header.licence)


def save(path: Path, trace: FailureTrace, hosts: int) -> None:
    """Write a trace of ``hosts``, so that `load` reads it.

    Raises:
        UserError: the file cannot be written.
    """
    own = {"hosts": hosts, "seconds": trace.seconds, "replaced": trace.replaced}
    header = TraceHeader(KIND, VERSION, trace.source, trace.licence)
    write(path, header, own, (asdict(change) for change in trace.changes))


def seated(changes: Sequence[HostChange], hosts: int) -> tuple[HostChange, ...]:
    """``changes`` among ``hosts`` places, from time 0: a host that comes takes the first free place.

    In a capture every new host has a number of its own, and more or fewer may be there than the job has
    places. Hosts for which no place is free are left out; places for which no host is there yet are lost at
    time 0.
    """
    if not changes:
        return ()
    begin = changes[0].time
    seats: dict[int, int] = {}
    changes_ = []
    for change in changes:
        lost = tuple(sorted(seats.pop(host) for host in change.lost if host in seats))
        joined = []
        for host in change.joined:
            free = set(range(hosts)) - set(seats.values())
            if free:
                seats[host] = min(free)
                joined.append(seats[host])
        time = change.time - begin
        if time == 0:
            empty = tuple(sorted(set(range(hosts)) - set(joined)))
            if empty:
                changes_.append(HostChange(0.0, empty, cause="not there yet"))
        elif lost or joined:
            changes_.append(HostChange(time, lost, tuple(joined), change.software, change.cause))
    return tuple(changes_)
