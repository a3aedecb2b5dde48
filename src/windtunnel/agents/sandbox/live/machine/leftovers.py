"""What sandboxes have left on the host that no sandbox owns any more: after a kill -9 of the daemon, or a
fault."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import psutil

from windtunnel.agents.sandbox.errors import MachineError
from windtunnel.agents.sandbox.live.machine import network
from windtunnel.agents.sandbox.live.machine.group import INIT, Cgroup, Group
from windtunnel.agents.sandbox.live.place import Home
from windtunnel.linux import LinuxError, cgroup
from windtunnel.linux.namespaces import holds_namespace
from windtunnel.linux.network import remove_link


def leftovers(home: Home, boxes: Iterable[str]) -> list[str]:
    """In words: control groups, network namespaces and devices of this home that none of ``boxes`` owns."""
    owned = set(boxes)
    if os.geteuid() != 0:
        return [f"processes of sandbox {name}" for name in sorted(_running(home) - owned)]
    found = [f"control group of sandbox {name}" for name in sorted(_groups(home) - owned)]
    found += [f"network namespace of sandbox {name}" for name in sorted(_namespaces(home) - owned)]
    found += [f"network device {name}" for name in sorted(_devices(home, owned))]
    return found


def collect(home: Home, boxes: Iterable[str]) -> list[str]:
    """Remove what `leftovers` finds, killing what runs in such control groups. Returns what was removed."""
    owned = set(boxes)
    found = leftovers(home, owned)
    failed: list[str] = []
    held: list[Cgroup | Group] = [Cgroup(home.tag, name) for name in _groups(home) - owned]
    held += [Group(home, name) for name in _running(home) - owned]
    for group in held:
        try:
            group.kill()
            group.remove()
        except MachineError as error:
            failed.append(str(error))
    for name in _namespaces(home) - owned:
        with contextlib.suppress(MachineError, OSError):
            network.remove(home, name)
    for name in _devices(home, owned):
        with contextlib.suppress(OSError):
            remove_link(name)
    still = set(leftovers(home, owned))
    if failed:
        raise MachineError("; ".join(failed))
    return [line for line in found if line not in still]


def _running(home: Home) -> set[str]:
    """Sandboxes without root whose init runs."""
    if os.geteuid() == 0 or not home.boxes.is_dir():
        return set()
    return {file.parent.name for file in home.boxes.glob(f"*/{INIT}") if Group(home, file.parent.name).init()}


def _groups(home: Home) -> set[str]:
    if os.geteuid() != 0:
        return set()
    try:
        found = cgroup.mounts()
    except LinuxError:
        return set()
    names: set[str] = set()
    for point in (found.unified, *found.v1.values()):
        folder = point / f"windtunnel-{home.tag}"
        if folder.is_dir():
            names |= {entry.name for entry in folder.iterdir() if entry.is_dir()}
    return names


def _namespaces(home: Home) -> set[str]:
    if not home.boxes.is_dir():
        return set()
    return {path.parent.name for path in home.boxes.glob("*/netns") if holds_namespace(Path(path))}


def _devices(home: Home, boxes: set[str]) -> set[str]:
    own = {network.device_name(home, name) for name in boxes}
    prefix = f"wt{home.tag[:5]}"
    return {name for name in psutil.net_if_addrs() if name.startswith(prefix)} - own
