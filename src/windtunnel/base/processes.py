"""What identifies a process: its id alone may be reused."""

from __future__ import annotations

from pathlib import Path


def start_time(pid: int) -> int | None:
    """When a process was started, in clock ticks since boot (proc(5)); None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
