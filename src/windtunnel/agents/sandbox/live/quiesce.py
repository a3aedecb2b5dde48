"""Wait until shells stand at their prompt: one that has answered may still be putting its descriptors back.

What is read of it (or dumped) between the answer and the next read would show descriptors that are none of
the command's doing. Such a shell needs microseconds; on a busy host, until it gets a CPU.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from pathlib import Path

WAITS = {"x86_64": (b"0 ", b"61 "), "aarch64": (b"63 ", b"260 ")}.get(platform.machine(), ())
"""What /proc/PID/syscall begins with in read(2), at the prompt, and in wait4(2), while a command runs."""


def settle(shells: Mapping[str, int], timeout: float = 0.25) -> tuple[str, ...]:
    """Names of the shells (name to host pid) that did not come to wait for input in ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    busy = dict(shells)
    while True:
        busy = {name: pid for name, pid in busy.items() if not _waits(pid)}
        if not busy or time.monotonic() > deadline:
            return tuple(sorted(busy))
        time.sleep(0.0002)


def _waits(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/syscall").read_bytes().startswith(WAITS)
    except OSError:
        return True
