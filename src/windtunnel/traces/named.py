"""A trace of failures by its name or from a file, for a job of a given number of hosts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from windtunnel.base.errors import UserError
from windtunnel.traces.failures import Change
from windtunnel.traces.published import SPOT, llama3, read_csv, read_skypilot, spot

NAMED = ("llama3", *(f"spot:{kind}" for kind in SPOT))
"""What `load` takes besides files: generated ones, with the published statistics."""


@dataclass(frozen=True)
class Trace:
    """``seconds``: how long it lasts. ``replaced``: whether hosts come back as the trace says, or (False)
    when whoever simulates it replaces them."""

    changes: tuple[Change, ...]
    seconds: float
    replaced: bool

    @property
    def losses(self) -> tuple[Change, ...]:
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
) -> Trace:
    """The trace ``name`` (one of `NAMED`, or a file of `read_csv` or, in JSON, of `read_skypilot`) for a job
    of ``hosts``, cut off after ``seconds``.

    ``per_host``, ``domain_size``: as for `published.llama3`.

    Raises:
        UserError: neither a known name nor a file that can be read.
    """
    if name == "llama3":
        changes = llama3(hosts, seconds, random, per_host=per_host, domain_size=domain_size)
        return Trace(changes, seconds, replaced=False)
    if name in NAMED:
        kind = name.partition(":")[2]
        length = SPOT[kind].seconds
        changes = spot(hosts, kind, random)
    else:
        changes = seated(_read(Path(name)), hosts)
        length = max((change.time for change in changes), default=0.0)
        if not length > 0:
            raise UserError(f"trace {name}: nothing happens in it; at least two instants are needed")
    seconds = min(seconds, length)
    return Trace(tuple(change for change in changes if change.time <= seconds), seconds, replaced=True)


def _read(path: Path) -> tuple[Change, ...]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"trace {path}: {error}; accepted are {', '.join(NAMED)}, or a file") from None
    return read_skypilot(text, path.name) if path.suffix == ".json" else read_csv(text, path.name)


def seated(changes: Sequence[Change], hosts: int) -> tuple[Change, ...]:
    """``changes`` among ``hosts`` places, from time 0: a host that comes takes the first free place.

    In a capture every new host has a number of its own, and more or fewer may be there than the job has
    places. Hosts for which no place is free are left out; places for which no host is there yet are lost at
    time 0.
    """
    if not changes:
        return ()
    begin = changes[0].time
    seats: dict[int, int] = {}
    found = []
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
                found.append(Change(0.0, empty, cause="not there yet"))
        elif lost or joined:
            found.append(Change(time, lost, tuple(joined), change.software, change.cause))
    return tuple(found)
