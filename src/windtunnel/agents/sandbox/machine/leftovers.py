"""What a crash of the host leaves: parts that no sandbox owns any more, and sandboxes that stand still.

A sandbox must not stay frozen because its host's process was killed in the middle of a checkpoint. A shell
waits for the end of its input, which comes when the process that holds the other end dies, however it dies;
then it thaws every sandbox of the home, but ends those that a restore had made and not looked at yet: they
may be less than they were, and nobody was told that they run. One shell serves a whole host and ends with it.

A CRIU that was at work goes on without its host, and at its end it puts the freezer back as it found it:
frozen. So the shell thaws until there is none any more, and the next host waits for the shell.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import psutil

from windtunnel.agents.sandbox.errors import MachineError
from windtunnel.agents.sandbox.machine import network, walls
from windtunnel.agents.sandbox.machine.group import INIT, Cgroup, Group
from windtunnel.agents.sandbox.place import UNVERIFIED, Home
from windtunnel.linux import LinuxError, cgroup
from windtunnel.linux.namespaces import holds_namespace
from windtunnel.linux.network import remove_link


def leftovers(home: Home, boxes: Iterable[str]) -> list[str]:
    """In words: control groups, network namespaces, /dev and network devices of this home that none of
    ``boxes`` owns."""
    return [words for words, _ in _unclaimed(home, set(boxes))]


def collect(home: Home, boxes: Iterable[str]) -> list[str]:
    """Remove what `leftovers` finds, killing what runs in such control groups. Returns what was removed.
    Raises MachineError for what does not end."""
    owned = set(boxes)
    parts, failed = _unclaimed(home, owned), list[str]()
    for _, remove in parts:
        try:
            with contextlib.suppress(OSError):  # gone meanwhile
                remove()
        except MachineError as error:
            failed.append(str(error))
    if failed:
        raise MachineError("; ".join(failed))
    still = leftovers(home, owned)
    return [words for words, _ in parts if words not in still]


def _unclaimed(home: Home, owned: set[str]) -> list[tuple[str, Callable[[], None]]]:
    """What none of ``owned`` has: in words, and how it is removed."""

    def named(pattern: str, there: Callable[[Path], bool]) -> list[str]:
        """Sandboxes whose folder has such an entry, which is not only a name."""
        names = {path.parent.name for path in home.boxes.glob(f"*/{pattern}") if there(path)}
        return sorted(names - owned)

    def end(group: Cgroup | Group) -> None:
        group.kill()
        group.remove()

    if os.geteuid() != 0:
        running = named(INIT, lambda path: Group(home, path.parent.name).init() != 0)
        return [(f"processes of sandbox {name}", partial(end, Group(home, name))) for name in running]
    parts: list[tuple[str, Callable[[], None]]] = []
    for name in sorted(_groups(home) - owned):
        parts.append((f"control group of sandbox {name}", partial(end, Cgroup(home.tag, name))))
    for name in named("netns", holds_namespace):
        parts.append((f"network namespace of sandbox {name}", partial(network.remove, home, name)))
    for name in named("dev", lambda path: walls.held(home, path.parent.name)):
        parts.append((f"/dev of sandbox {name}", partial(walls.release, home, name)))
    devices = {name for name in psutil.net_if_addrs() if name.startswith(f"wt{home.tag[:5]}")}
    for name in sorted(devices - {network.device_name(home, box) for box in owned}):
        parts.append((f"network device {name}", partial(remove_link, name)))
    return parts


def _groups(home: Home) -> set[str]:
    try:
        mounts = cgroup.mounts()
    except LinuxError:
        return set()
    folders = [point / f"windtunnel-{home.tag}" for point in (mounts.unified, *mounts.v1.values())]
    there = [folder for folder in folders if folder.is_dir()]
    return {entry.name for folder in there for entry in folder.iterdir() if entry.is_dir()}


CONTINUE = (
    'read -r _; for note in "$1"/*/stopped; do '
    'if [ -f "$note" ]; then kill -CONT $(cat "$note"); rm -f "$note"; fi; done 2>/dev/null'
)
"""What the shell does where processes are stopped one by one (``group``)."""
THAW = """exec 2>/dev/null
thaw() { for file in "$1"/*/cgroup.freeze; do echo 0 > "$file"; done; }
at_work() {
  for file in /proc/[0-9]*/cmdline; do
    line=; IFS= read -r line < "$file"
    case "$line" in *"$1"/*) file=${file#/proc/}; echo "${file%/*}"; esac
  done
}
read -r _
for note in "$2"/*UNVERIFIED; do
  [ -e "$note" ] || continue
  name=${note##*/}
  group=$1/${name%UNVERIFIED}
  rm "$note"
  # its first process may just have been born and be in no group yet
  for _ in $(seq 100); do
    left=$(at_work "restore-d-D$2")
    [ -n "$left" ] || break
    kill -9 $left
    sleep 0.01
  done
  END
done
for _ in $(seq 600); do
  thaw "$1"
  [ -n "$(at_work "--freeze-cgroup$1")" ] || break
  sleep 0.1
done
thaw "$1"
""".replace("UNVERIFIED", UNVERIFIED).replace("END", cgroup.END.format('"$group"'))
"""The same where control groups are frozen. What a restore had not looked at yet is ended: first the note
goes (a CRIU that is about to work ends what it made where there is none), then CRIU, then what stands."""
PATIENCE = 70.0
"""Seconds; longer than the shell goes on."""


class Guard:
    """Lets the sandboxes of ``home`` go on once this process is gone, as this user can."""

    def __init__(self, home: Home) -> None:
        rootless = os.geteuid() != 0
        groups = home.boxes if rootless else Cgroup(home.tag, "any").path.parent
        dumps = home.unverified("any").parent
        self._groups = groups
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", CONTINUE if rootless else THAW, "windtunnel-guard", str(groups), str(dumps)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        # for the next host of the home
        (home.path / "guard").write_text(str(self._shell.pid))

    def close(self) -> None:
        """End it; what it does then is harmless, since nothing is frozen. No checkpoint of this host is under
        way any more, so a CRIU that still runs is one of a host before, for which the shell would wait."""
        assert self._shell.stdin is not None
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if "--freeze-cgroup" in words and any(word.startswith(f"{self._groups}/") for word in words):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self._shell.stdin.close()
        self._shell.wait()


def wait_for_guard(home: Home) -> None:
    """Until the guard of the host before, which may have been killed just now, has done its work."""
    deadline = time.monotonic() + PATIENCE
    with contextlib.suppress(OSError):
        command = Path("/proc", (home.path / "guard").read_text(), "cmdline")
        while b"windtunnel-guard" in command.read_bytes() and time.monotonic() < deadline:
            time.sleep(0.01)
