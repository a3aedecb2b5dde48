"""Control groups: a freezer, limits, and the certainty of what belongs together.

A v2 group always exists: its freezer stops all inside as one, its inode names them to eBPF, and its list of
processes is complete whatever they did. Where memory, cpu and pids are still v1 controllers (a hybrid host),
a group of the same name is made in each of them.

Source: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1 of the kernel.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from windtunnel.base.errors import UserError
from windtunnel.linux import LinuxError
from windtunnel.linux.mounts import table

CONTROLLERS = ("memory", "cpu", "pids")
CPU_PERIOD = 100_000
"""Microseconds over which a share of the CPUs is counted."""
USUAL, FIRST = {"cpu.shares": 1024, "cpu.weight": 100}, {"cpu.shares": 262_144, "cpu.weight": 10_000}
"""The weight of a group by default, and the largest: of v1 and v2."""

END = "{{ echo 1 > {0}/cgroup.kill || kill -9 $(cat {0}/cgroup.procs); }}"
"""Shell that kills all processes of a v2 group (its folder, as the shell takes it): before Linux 5.14 one by
one, which takes all that stand still."""


@dataclass(frozen=True)
class Mounts:
    """Where this host's control groups are mounted: v2, and each v1 controller that is in use."""

    unified: Path
    v1: dict[str, Path]


def mounts(mountinfo: Path = Path("/proc/self/mountinfo")) -> Mounts:
    """Raises LinuxError when the host has no v2 mount."""
    unified: Path | None = None
    v1: dict[str, Path] = {}
    for each in table(mountinfo):
        if each.kind == "cgroup2" and unified is None:
            unified = Path(each.point)
        elif each.kind == "cgroup":
            for option in each.options.split(","):
                if option in CONTROLLERS:
                    v1.setdefault(option, Path(each.point))
    if unified is None:
        raise LinuxError("this host has no cgroup v2 mount: mount -t cgroup2 none /sys/fs/cgroup/unified")
    return Mounts(unified, v1)


def numbered(folder: Path, field: str) -> tuple[int, int]:
    """The number by which the kernel knows the v2 group of ``folder``, and how deep it lies. ``field``
    names it in the message.

    Raises:
        UserError: it is no group, or the topmost.
        LinuxError: the host has no v2 mount.
    """
    top = mounts().unified
    if not folder.is_relative_to(top) or folder == top or not (folder / "cgroup.procs").exists():
        raise UserError(f"{field} is {str(folder)!r}, accepted is the folder of a cgroup in {top}")
    return os.stat(folder).st_ino, len(folder.relative_to(top).parts)


class HostCgroup:
    """The group ``below`` (two names: one of its owner's, its own) in every hierarchy of this host.

    Methods raise LinuxError for what cannot be done."""

    def __init__(self, below: Path) -> None:
        hierarchies = mounts()
        self.path = hierarchies.unified / below
        self.v1 = {name: point / below for name, point in hierarchies.v1.items()}

    @property
    def procs(self) -> tuple[Path, ...]:
        return tuple(folder / "cgroup.procs" for folder in (*dict.fromkeys(self.v1.values()), self.path))

    def make(self, memory: int | None, cpus: float | None, pids: int | None) -> list[str]:
        """Make the groups and set the limits (bytes, processors, processes; None for none); returns, in
        words, those that could not be set."""
        try:
            for folder in (*self.v1.values(), self.path):
                _make_folder(folder)
        except OSError as error:
            words = f"cannot make a control group: {error.strerror} ({error.filename})"
            raise LinuxError(words, error.errno) from error
        if not self.v1.keys() >= set(CONTROLLERS):
            self._hand_down()
        _weigh(self.v1.get("cpu", self.path), USUAL)  # who let it go first may have been killed meanwhile
        missed = []
        for words, controller, limit, allowed in (
            ("memory", "memory", memory, self._memory(memory)),
            ("CPUs", "cpu", cpus, self._cpu(cpus)),
            ("processes", "pids", pids, {"pids.max": "max" if pids is None else str(pids)}),
        ):
            folder = self.v1.get(controller, self.path)
            try:
                for file, value in allowed.items():
                    if not (folder / file).exists() and (limit is None or "swap" in file or "oom" in file):
                        continue
                    _write(folder / file, value)
            except OSError as error:
                if limit is not None:
                    missed.append(f"the limit on {words} could not be set: {error.strerror}")
        return missed

    def _hand_down(self) -> None:
        for folder in (self.path.parent.parent, self.path.parent):
            for controller in CONTROLLERS:
                if controller not in self.v1:
                    with contextlib.suppress(OSError):
                        _write(folder / "cgroup.subtree_control", f"+{controller}")

    def _memory(self, limit: int | None) -> dict[str, str]:
        if "memory" in self.v1:
            value = "-1" if limit is None else str(limit)
            now = _number(self.v1["memory"] / "memory.limit_in_bytes")
            both = {"memory.limit_in_bytes": value, "memory.memsw.limit_in_bytes": value}
            # memory plus swap may never be below memory: the one that grows goes first
            grows = limit is None or (now is not None and limit > now)
            return dict(reversed(both.items())) if grows else both
        value = "max" if limit is None else str(limit)
        return {"memory.max": value, "memory.swap.max": "max" if limit is None else "0"}

    def _cpu(self, cpus: float | None) -> dict[str, str]:
        quota = None if cpus is None else max(1000, round(cpus * CPU_PERIOD))
        if "cpu" in self.v1:
            return {
                "cpu.cfs_period_us": str(CPU_PERIOD),
                "cpu.cfs_quota_us": "-1" if quota is None else str(quota),
            }
        return {"cpu.max": f"{'max' if quota is None else quota} {CPU_PERIOD}"}

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """Within the block its processes have the CPUs before those of other groups of the same owner.

        For moments in which somebody outside waits for what they do, as a dump waits for its code inside of
        them: behind busy groups each of its hundreds of steps would wait for the CPU. All groups together
        weigh what they did: more would starve the kernel's own threads, which every step needs too.
        """
        _weigh(self.v1.get("cpu", self.path), FIRST)
        try:
            yield
        finally:
            _weigh(self.v1.get("cpu", self.path), USUAL)

    @contextlib.contextmanager
    def roomy(self) -> Iterator[None]:
        """Within the block there is no limit of processes: whoever restores those that are at it needs a
        few helpers of its own among them."""
        file = self.v1.get("pids", self.path) / "pids.max"
        try:
            limit = file.read_text()
            file.write_text("max")
        except OSError:  # it has no such limit
            limit = ""
        try:
            yield
        finally:
            if limit:
                with contextlib.suppress(OSError):
                    file.write_text(limit)

    def exists(self) -> bool:
        return self.path.exists()

    def pids(self) -> set[int]:
        """Pids of all processes inside, now, as this host sees them."""
        return set(pids_of(self.path))

    def freeze(self, timeout: float = 10.0) -> None:
        """Stop every process, and return when all stand. Thawed again when that takes too long."""
        try:
            freeze(self.path)
            wait_for(self.path, b"frozen 1", timeout)
        except TimeoutError as error:
            self.thaw()
            raise LinuxError("the control group is not frozen: a process does not stop") from error
        except OSError as error:
            self.thaw()
            raise LinuxError(f"the control group is not frozen: {error.strerror}", error.errno) from error

    def thaw(self) -> None:
        thaw(self.path)

    def kill(self, timeout: float = 30.0) -> None:
        """Kill everything inside, frozen or not, and return when nothing is left."""
        if not self.path.exists():
            return
        deadline = time.monotonic() + timeout
        while True:
            try:
                _write(self.path / "cgroup.kill", "1")
            except OSError:
                for pid in self.pids():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            self.thaw()
            try:
                wait_for(self.path, b"populated 0", 0.5)
                return
            except FileNotFoundError:
                return
            except TimeoutError as error:
                if time.monotonic() > deadline:
                    raise LinuxError(
                        f"processes {sorted(self.pids())} do not die (they wait for a device)"
                    ) from error

    def remove(self) -> None:
        """Remove the empty groups; what is gone already is fine."""
        for folder in (*self.v1.values(), self.path):
            deadline = time.monotonic() + 5
            while True:
                try:
                    folder.rmdir()
                except FileNotFoundError:
                    pass
                except OSError as error:
                    # a process that was just reaped may be counted for a moment longer
                    if time.monotonic() > deadline:
                        raise LinuxError(f"control group {folder} is still in use", error.errno) from error
                    time.sleep(0.002)
                    continue
                break
            with contextlib.suppress(OSError):
                folder.parent.rmdir()

    def usage(self) -> tuple[float, int]:
        """CPU seconds used, and bytes of memory held now; zero where the host does not count."""
        cpu = 0.0
        with contextlib.suppress(OSError):
            for line in (self.path / "cpu.stat").read_text().splitlines():
                if line.startswith("usage_usec "):
                    cpu = int(line.split()[1]) / 1e6
        memory = self.v1.get("memory")
        file = memory / "memory.usage_in_bytes" if memory else self.path / "memory.current"
        return cpu, _number(file) or 0


def pids_of(folder: Path) -> list[int]:
    """Processes of the group that has this folder; none when it is gone."""
    try:
        return [int(line) for line in (folder / "cgroup.procs").read_bytes().split()]
    except OSError:
        return []


def own() -> Path:
    """The v2 group in which this process is. Raises LinuxError when the host has no v2 mount."""
    top = mounts().unified
    with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as lines:
        within = next((line[3:].strip("/\n") for line in lines if line.startswith("0::")), "")
    path = top / within
    return path if (path / "cgroup.procs").exists() else top


def freeze(folder: Path) -> None:
    """Ask every process of the v2 group to stand still; `wait_for` tells when they do."""
    _write(folder / "cgroup.freeze", "1")


def thaw(folder: Path) -> None:
    """Let the processes of the v2 group go on; a group that is gone is fine."""
    with contextlib.suppress(FileNotFoundError):
        _write(folder / "cgroup.freeze", "0")


def wait_for(folder: Path, line: bytes, timeout: float) -> None:
    """Return when the ``cgroup.events`` of the v2 group hold ``line``. Raises TimeoutError."""
    deadline = time.monotonic() + timeout
    events = os.open(folder / "cgroup.events", os.O_RDONLY | os.O_CLOEXEC)
    try:
        poll = select.poll()
        poll.register(events, select.POLLPRI)
        while line not in os.pread(events, 4096, 0):
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            poll.poll(min(left, 1.0) * 1000)
    finally:
        os.close(events)


def _weigh(folder: Path, weights: dict[str, int]) -> None:
    """A host without this controller weighs nothing."""
    for file, weight in weights.items():
        with contextlib.suppress(OSError):
            _write(folder / file, str(weight))


def _make_folder(folder: Path) -> None:
    """Make the group and the one above it, which may be removed in between, with another group."""
    for _ in range(1000):
        with contextlib.suppress(FileNotFoundError):
            folder.parent.mkdir(exist_ok=True)
            folder.mkdir(exist_ok=True)
            return
    folder.mkdir(parents=True, exist_ok=True)


def _write(file: Path, value: str) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, value.encode())
    finally:
        os.close(descriptor)


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
