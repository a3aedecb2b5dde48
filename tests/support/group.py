"""Engines of a group in a folder, and a group of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from windtunnel.data.group import EngineProcess, Member, ReplicationGroup, start_engine
from windtunnel.data.group.live import client
from windtunnel.linux import namespaces
from windtunnel.store.eventlog import EventLog

SECRET = b"the secret of these tests"
SIZE = 4 << 20
JOURNAL = 2 << 20
STRIKES = """
import errno, os, sys
from windtunnel.data.group.live import engine
from windtunnel.linux import faults
faults.InjectedError = lambda text: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
faults.inject_at(engine.RegionEngine, *{point!r})
engine.main(sys.argv[1:])
"""
"""What is raised on purpose is the error of a full disk."""


class Replicas:
    """Engines called m0, m1, … each in ``folder``, or in the network namespace that stands in ``places``."""

    def __init__(
        self, folder: Path, domains: Sequence[str], places: Sequence[tuple[str | None, str]] = ()
    ) -> None:
        self.folder, self.domains, self.places = folder, domains, places
        self.engines: dict[str, EngineProcess] = {}
        for number in range(len(domains)):
            self.start(f"m{number}")

    def region(self, name: str) -> Path:
        return self.folder / name

    def start(self, name: str, region: Path | None = None, point: tuple[Any, ...] | None = None) -> None:
        """(Again.) ``point``: of `faults.inject_at`, what strikes in the engine."""
        place, host = self.places[int(name[1:])] if self.places else (None, "")
        listen = f"tcp:{host}:0" if host else f"unix:{self.folder}/{name}.sock"
        before = client.COMMAND
        if point is not None:
            client.COMMAND = ("-c", STRIKES.format(point=point))  # type: ignore[assignment]
        try:
            self.engines[name] = namespaces.within(
                place,
                lambda: start_engine(
                    region or self.region(name), SIZE, listen=listen, secret=SECRET, realtime=False
                ),
            )
        finally:
            client.COMMAND = before

    def member(self, name: str) -> Member:
        return Member(name, self.engines[name].address, self.domains[int(name[1:])])

    @property
    def members(self) -> list[Member]:
        return [self.member(name) for name in sorted(self.engines)]

    def group(self, epoch: int = 1, **given: Any) -> ReplicationGroup:
        return ReplicationGroup(self.members, epoch=epoch, secret=SECRET, **{"patience": 20.0, **given})

    def content(self, name: str) -> bytes:
        """The region as its file has it."""
        return self.region(name).read_bytes()[:SIZE]


def lost_one(folder: Path) -> Path:
    """The log of a group that loses a member, goes on, and takes it back, behind the others."""
    log = EventLog(folder / "events.jsonl")
    with replicas(folder, "aab") as copies, copies.group(coordinator="a", log=log) as group:
        group.write(0, b"all three").result()
        copies.engines["m1"].stop()
        with group.repair([member for member in group.members if member.name != "m1"]) as rest:
            rest.write(0, b"two of them").result()
            copies.start("m1")
            copies.group(rest.epoch + 1, coordinator="b", log=log).close()
    return log.path


@contextlib.contextmanager
def replicas(
    folder: Path, domains: Sequence[str] = ("a", "b", "c"), places: Sequence[tuple[str | None, str]] = ()
) -> Iterator[Replicas]:
    """Ended at the end."""
    copies = Replicas.__new__(Replicas)
    copies.engines = {}
    try:
        copies.__init__(folder, domains, places)  # type: ignore[misc]
        yield copies
    finally:
        for engine in copies.engines.values():
            engine.stop()
