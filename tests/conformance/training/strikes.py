"""What strikes a running job from outside: signals, its files, its network (`strangers`: what is said to it).

Each strike is a function of the `Target`, and returns what undoes it where something stays: a process that
stands still, a link that is down, a full disk.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from conformance.training import forge
from conformance.training.commanded import Commanded
from conformance.training.fsdp_trainer import FAULT
from windtunnel.base import atomic
from windtunnel.linux import network, processes
from windtunnel.linux.forkserver_client import serving
from windtunnel.training import cleanup, site
from windtunnel.training.elastic.policy.state import past
from windtunnel.training.hosts import split_address

Undo = Callable[[], None]
SLOW = 2e5  # bytes/s of a slow link; of the others there is no limit
FAST = 1e9
FUTURE = 1_000_000  # steps by which a forged checkpoint is newer
PATIENCE = 30.0
STANDS = 3.0  # seconds
_FILLER = "filler"


class Impossible(RuntimeError):
    """A strike finds nothing to strike."""


@dataclass
class Target:
    """``stored``: folder of checkpoints on a file system of its own. ``rank``: whom to strike."""

    job: Commanded
    stored: Path
    random: Random
    rank: int = 0

    def places(self) -> dict[int, dict[str, Any]]:
        """What stands at each place (`site.statuses`)."""
        return site.statuses(self.job.folder, lambda pid: processes.state(pid) not in ("", "Z"))

    def network(self) -> network.Network:
        """Of the hosts, as they are now."""
        names = [name for _, name in site.numbered(self.job.folder)]
        address = self.job.site()["network"]
        assert address is not None
        return network.Network(self.job.token, None, address, names)

    def place(self) -> dict[str, Any]:
        """What stands at the place of `rank`; a host or a worker that is being replaced is waited for."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and self.job.outcome is None:
            status = self.places().get(self.rank)
            if status is not None and status["workers"] and all(status["workers"].values()):
                return status
            time.sleep(0.02)
        raise Impossible(f"nobody came to place {self.rank}")

    def trainer(self) -> int:
        """The process of `rank`."""
        return int(self.place()["workers"][self.rank])

    def process(self, part: str) -> int:
        """The process of the run whose command line has ``part``."""
        for pid in cleanup.marked(self.job.token):
            if part in processes.command_line(pid):
                return pid
        raise Impossible(f"there is no process {part}")

    def forkserver(self) -> int:
        """The fork server; what it has forked has the same command line."""
        process = serving(cleanup.MEMORY / self.job.token / "forkserver")
        if process is None:
            raise Impossible("no fork server listens")
        return process.pid

    def hosts(self) -> Iterator[str]:
        """Names of the hosts in the run's network, by place, from the command lines of their agents."""
        for _, status in sorted(self.places().items()):
            name = re.search(r"([^/ ]+)\.config", processes.command_line(status["pid"]))
            if name is not None:
                yield name[1]

    def ports(self) -> list[tuple[str, int]]:
        """Where the supervisor and the memory services of the hosts listen."""
        known = past(self.job.events())
        addresses = [known.address, *(host.memory for host, _ in known.attended.values())]
        return sorted(split_address(address, "a service") for address in addresses)


def _signal(pid: int, number: int) -> Undo:
    os.kill(pid, number)
    if number != signal.SIGSTOP:
        return nothing

    def go_on() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    return go_on


def nothing() -> None:
    pass


def trainer_killed(target: Target) -> Undo:
    return _signal(target.trainer(), signal.SIGKILL)


def trainer_stopped(target: Target) -> Undo:
    return _signal(target.trainer(), signal.SIGSTOP)


def trainer_hung_up(target: Target) -> Undo:
    return _signal(target.trainer(), signal.SIGHUP)


def trainer_ended(target: Target) -> Undo:
    return _signal(target.trainer(), signal.SIGTERM)


def program_failed(target: Target) -> Undo:
    """It raises, on one rank."""
    return _befalls(target, "raise")


def program_hung(target: Target) -> Undo:
    """One rank waits for what never comes; its process lives and gives signs of it."""
    return _befalls(target, "hang")


def _befalls(target: Target, what: str) -> Undo:
    target.trainer()  # whom it can befall
    path = target.job.folder / FAULT.format(rank=target.rank)
    atomic.replace(path, what)
    end = time.monotonic() + PATIENCE
    while path.exists():
        if time.monotonic() > end:
            path.unlink(missing_ok=True)
            raise Impossible("the program did no step")
        time.sleep(0.01)
    return nothing


def launcher_killed(target: Target) -> Undo:
    """And started anew, as by systemd."""
    _signal(target.job.process.pid, signal.SIGKILL)
    target.job.restart()
    return nothing


def launcher_stopped(target: Target) -> Undo:
    """For longer than a lease."""
    go_on = _signal(target.job.process.pid, signal.SIGSTOP)
    time.sleep(STANDS)
    go_on()
    return nothing


def agent_killed(target: Target) -> Undo:
    return _signal(target.place()["pid"], signal.SIGKILL)


def agent_stopped(target: Target) -> Undo:
    return _signal(target.place()["pid"], signal.SIGSTOP)


def forkserver_killed(target: Target) -> Undo:
    return _signal(target.forkserver(), signal.SIGKILL)


def forkserver_stopped(target: Target) -> Undo:
    """And something is to be started by it."""
    trainer = target.trainer()  # while it is being started itself, it would wait for what is stopped
    go_on = _signal(target.forkserver(), signal.SIGSTOP)
    _signal(trainer, signal.SIGKILL)
    return go_on


def host_lost(target: Target) -> Undo:
    """The workers, the agent and the memory of a host, at once."""
    status = target.place()
    for pid in (status["pid"], *status["workers"].values()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(status["memory"], ignore_errors=True)
    return nothing


def killed_in_recovery(target: Target) -> Undo:
    """Two trainers, the second while the job recovers from the first."""
    trainer_killed(target)
    time.sleep(target.random.uniform(0.05, 0.5))
    target.rank = (target.rank + 1) % target.job.hosts
    with contextlib.suppress(ProcessLookupError):
        trainer_killed(target)
    return nothing


def memory_wiped(target: Target) -> Undo:
    """All slots that a host holds, under the hands of its agent and its trainer."""
    for path in Path(target.place()["memory"]).rglob("*.slot"):
        path.unlink(missing_ok=True)
    return nothing


def bit_flipped(target: Target) -> Undo:
    """In every slot of a host; then its trainer goes, so that they are read."""
    forge.flip_memory(Path(target.place()["memory"]))
    return trainer_killed(target)


def checkpoint_forged(target: Target) -> Undo:
    """A whole checkpoint of the future, in storage and in a host's memory; then its trainer goes."""
    if not forge.forge_stored(str(target.stored), FUTURE):
        raise Impossible("nothing is in storage yet")
    forge.forge_memory(Path(target.place()["memory"]), FUTURE)
    return trainer_killed(target)


def disk_full(target: Target) -> Undo:
    """The storage of checkpoints, which has a file system of its own."""
    return _filled(target.stored)


def memory_full(target: Target) -> Undo:
    """The file system of the hosts' shared memory, where it is not that of this computer; then a trainer
    goes, and the next one needs it."""
    folder = Path(f"/proc/{target.place()['pid']}/root{cleanup.MEMORY}")
    if folder.stat().st_dev == cleanup.MEMORY.stat().st_dev:
        raise Impossible("the hosts have no memory of their own")
    undo = _filled(folder)
    trainer_killed(target)
    return undo


def _filled(folder: Path) -> Undo:
    """To the last page."""
    opened = os.open(folder, os.O_PATH | os.O_DIRECTORY)  # the process through which it is seen may go
    for size in (1 << 20, 1 << 12):
        with contextlib.suppress(OSError), open(_FILLER, "ab", 0, opener=partial(_beneath, opened)) as file:
            while True:
                file.write(bytes(size))

    def empty() -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_FILLER, dir_fd=opened)
        os.close(opened)

    return empty


def _beneath(folder: int, name: str, flags: int) -> int:
    return os.open(name, flags, 0o600, dir_fd=folder)


def link_down(target: Target) -> Undo:
    network, name = target.network(), list(target.hosts())[target.rank]
    network.link_down(name)
    return lambda: network.link_up(name)


def link_slow(target: Target) -> Undo:
    network, name = target.network(), list(target.hosts())[target.rank]
    network.set_rate(name, SLOW)
    return lambda: network.set_rate(name, FAST)


def link_cut(target: Target) -> Undo:
    """Between two hosts alone; the supervisor reaches both."""
    network, names = target.network(), list(target.hosts())
    first, second = names[target.rank], names[(target.rank + 1) % len(names)]
    network.part(first, second, apart=True)
    return lambda: network.part(first, second, apart=False)
