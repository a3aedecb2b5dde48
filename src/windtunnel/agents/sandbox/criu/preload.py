"""What CRIU is started with where root lacks CAP_SYS_RESOURCE; run as a module, builds it anew.

A root of a container often lacks that capability, and without it prlimit(2) does not show the limits of a
process of another uid or gid, so CRIU would dump no tree that has one. A small library that is loaded before
CRIU's own (source in ``native/``) reads them where the kernel shows them to everybody. It has no C library of
its own and is bound to none, so the CRIU of packages, with its own loader, takes it too.
"""

from __future__ import annotations

import os
from pathlib import Path

from windtunnel.base.native import Freestanding
from windtunnel.linux.processes import capable

FLAGS = (
    "-Os", "-shared", "-fPIC", "-nostdlib", "-ffreestanding", "-fno-builtin", "-fno-stack-protector",
    "-fno-asynchronous-unwind-tables", "-Wall", "-Wextra", "-Werror", "-Wl,--build-id=none",
    "-Wl,-z,noexecstack", "-s",
)  # fmt: skip
LIMITS = Freestanding(
    Path(__file__).parent / "native" / "limits.c", "limits", ".so", FLAGS, "library for CRIU"
)
CAP_SYS_RESOURCE = 24


def environment() -> dict[str, str]:
    """The environment for a CRIU. Raises UserError where the library has to be built and cannot be."""
    if capable(CAP_SYS_RESOURCE):
        return dict(os.environ)
    others = os.environ.get("LD_PRELOAD", "")
    return {**os.environ, "LD_PRELOAD": f"{LIMITS.locate()}:{others}".rstrip(":")}


if __name__ == "__main__":
    LIMITS.rebuild()
