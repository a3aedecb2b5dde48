"""CPU time lent from one control group to another, and given back by whoever comes along.

What is lent is the elastic group's quota; meanwhile the kernel runs it only where nobody else wants to, so
that even a wrong loan yields at once. Before its first change the actuator notes how the group was in an
extended attribute of its folder, beside who it is: from that alone root can bring it back.

Source: cgroup-v2.rst (cpu.max, cpu.idle, cpu.pressure) and sched-bwc.rst (v1) of the kernel.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from windtunnel.base.errors import UserError
from windtunnel.base.processes import Adopted, Identity
from windtunnel.linux import LinuxError
from windtunnel.linux.cgroup import HostCgroup, mounts

NOTE = "trusted.windtunnel.node"
PERIOD, LEAST = 50_000, 1_000  # microseconds; the least that a kernel accepts is 2 % of a core
FILES = {
    "cpu.max": "{0} {1}", "cpu.cfs_quota_us": "{0}", "cpu.cfs_period_us": "{1}", "cpu.idle": "1",
    "cpu.weight": "", "cpu.shares": "",
}  # fmt: skip


@dataclass
class Groups:
    """The host of a `HarvestModel` or a `HarvestActuator`: two groups, by their paths below the mounts.

    Raises:
        UserError: a group that is not there.
        LinuxError: the host has no cgroup v2, gives no quota, or does not count pressure.
    """

    primary: Path
    elastic: Path
    cores: float = float(len(os.sched_getaffinity(0)))
    _used: tuple[float, float] | None = None
    _waits: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        for name in ("primary", "elastic"):
            if not HostCgroup(getattr(self, name)).exists():
                raise UserError(f"`{name}` is {str(getattr(self, name))!r}, accepted is the path of a cgroup")
        if not setting(folder_of(self.elastic)):
            raise LinuxError(f"{self.elastic} has no quota: its parent hands no cpu controller down")
        self.waited()

    def usage(self, now: float) -> float:
        """Cores that the primary used since the last call; its counter is exact to a tick of the kernel."""
        before, self._used = self._used, (now, HostCgroup(self.primary).usage()[0])
        return (self._used[1] - before[1]) / (now - before[0]) if before and now > before[0] else 0.0

    def waited(self) -> float:
        """The share of its time in which something of the primary wanted a core and had none."""
        whole, before = HostCgroup(self.primary), self._waits
        try:
            stalled = int((whole.path / "cpu.pressure").read_text().split("total=")[1].split()[0]) / 1e6
        except OSError as error:
            raise LinuxError(f"this kernel does not count pressure (psi=1): {error.strerror}") from error
        self._waits = stalled, whole.usage()[0]
        stalled, used = (now - then for now, then in zip(self._waits, before, strict=True))
        return stalled / (stalled + used) if stalled + used else 0.0

    def lend(self, cores: float) -> float:
        """Let the elastic group use so many cores, but no more than it might before; how many it then may.

        Raises:
            LinuxError: another agent lends to this group, or one was killed and nobody cleaned up.
        """
        folder, mine = folder_of(self.elastic), str(Identity.own())
        with contextlib.suppress(FileExistsError):
            os.setxattr(folder, NOTE, json.dumps([mine, setting(folder)]).encode(), os.XATTR_CREATE)
        owner, before = json.loads(os.getxattr(folder, NOTE))
        quota = max(LEAST, round(min(cores, lent(before)) * PERIOD))
        if owner != mine:
            raise LinuxError(f"{folder} has an agent, or one was killed: windtunnel control node clean")
        for name in before:
            if FILES[name]:  # a group that is idle has no weight
                (folder / name).write_text(FILES[name].format(quota, PERIOD))
        return lent(setting(folder))

    def restore(self) -> bool:
        """The group as it was, as often as one likes; whether there was anything to do."""
        return restore(folder_of(self.elastic))


def folder_of(group: Path) -> Path:
    """Where the files of a group's CPU time are."""
    whole = HostCgroup(group)
    return whole.v1.get("cpu", whole.path)


def setting(folder: Path) -> dict[str, str]:
    """A group's quota and weight, by their files."""
    return {name: (folder / name).read_text().strip() for name in FILES if (folder / name).exists()}


def lent(files: dict[str, str]) -> float:
    """Cores that a group may use by its `setting`; infinite where it has no quota."""
    quota, period = " ".join(files.values()).split()[:2]
    return float("inf") if quota in ("max", "-1") else int(quota) / int(period)


def restore(folder: Path) -> bool:
    """Bring a group back to what its note says; whether it has one that is not of another living agent."""
    try:
        owner, files = json.loads(os.getxattr(folder, NOTE))
    except OSError:
        return False
    if owner != str(Identity.own()) and Identity.parse(owner).lives():
        return False
    for name, text in files.items():
        if FILES[name] or files.get("cpu.idle") != "1":
            (folder / name).write_text(text)
    os.removexattr(folder, NOTE)
    return True


def clean() -> list[str]:
    """End all actuators that lend, also those that stand still, and bring their groups back: which.

    Raises:
        LinuxError: this is not root.
    """
    if os.geteuid():
        raise LinuxError("groups are brought back by root, and this process is not")
    host, cleaned = mounts(), []
    for folder, *_ in os.walk(host.v1.get("cpu", host.unified)):
        with contextlib.suppress(OSError):  # no note, or the group is gone
            actuator = Adopted(Identity.parse(json.loads(os.getxattr(folder, NOTE))[0]))
            actuator.kill()  # one that only stands still would go on lending
            actuator.wait(5.0)
            cleaned += [folder] * restore(Path(folder))
    return cleaned
