"""A sandbox must not stay frozen because its host's process was killed in the middle of a checkpoint.

A shell waits for the end of its input, which comes when the process that holds the other end dies,
however it dies; then it thaws every sandbox of the home. One shell serves a whole host and ends with it.

A CRIU that was at work goes on without its host, and at its end it puts the freezer back as it found it:
frozen. So the shell thaws until there is none any more, and the next host waits for the shell.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from pathlib import Path

from windtunnel.agents.sandbox.live.machine import Cgroup, rootless
from windtunnel.agents.sandbox.live.place import Home

CONTINUE = (
    'read -r _; for note in "$1"/*/stopped; do '
    'if [ -f "$note" ]; then kill -CONT $(cat "$note"); rm -f "$note"; fi; done 2>/dev/null'
)
"""The same where processes are stopped one by one (``machine.group``)."""
THAW = """exec 2>/dev/null
thaw() { for file in "$1"/*/cgroup.freeze; do echo 0 > "$file"; done; }
busy() {
  for file in /proc/[0-9]*/cmdline; do
    line=; IFS= read -r line < "$file"
    case "$line" in *--freeze-cgroup"$1"/*) return 0; esac
  done
  return 1
}
read -r _
for _ in $(seq 600); do
  thaw "$1"
  busy "$1" || break
  sleep 0.1
done
thaw "$1"
"""
PATIENCE = 70.0
"""Seconds; longer than the shell goes on."""


class Guard:
    """Thaws all groups below the folder ``groups`` once this process is gone: with CONTINUE, the sandboxes
    whose folders are there."""

    def __init__(self, groups: Path, script: str = THAW) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", script, "windtunnel-guard", str(groups)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._shell.pid

    def close(self) -> None:
        """End it; what it does then is harmless, since nothing is frozen."""
        assert self._shell.stdin is not None
        self._shell.stdin.close()
        self._shell.wait()


def guard_of(home: Home) -> Guard:
    """What lets the sandboxes of a home go on when the host dies while they stand still, for this user."""
    if rootless.rootless():
        return Guard(home.boxes, CONTINUE)
    return Guard(Cgroup(home.tag, "any").path.parent)


def note(home: Path, pid: int) -> None:
    """Let the next host of ``home`` know who guards it now."""
    (home / "guard").write_text(str(pid))


def wait_for_last(home: Path) -> None:
    """Until the guard of the host before, which may have been killed just now, has done its work."""
    deadline = time.monotonic() + PATIENCE
    with contextlib.suppress(OSError):
        command = Path("/proc", (home / "guard").read_text(), "cmdline")
        while b"windtunnel-guard" in command.read_bytes() and time.monotonic() < deadline:
            time.sleep(0.01)
