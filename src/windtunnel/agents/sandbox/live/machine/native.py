"""Where the compiled launcher and init is; run as a module, builds it anew.

It is one static program without a C library (source in ``init/``), so one build serves every Linux of a
processor.
"""

from __future__ import annotations

import functools
import platform
from pathlib import Path

from windtunnel.base import native

SOURCE = Path(__file__).parent / "init"
FLAGS = (
    "-Os", "-static", "-nostdlib", "-ffreestanding", "-fno-builtin", "-fno-stack-protector", "-fno-pie",
    "-no-pie", "-fno-asynchronous-unwind-tables", "-Wall", "-Wextra", "-Werror", "-Wl,--build-id=none",
    "-Wl,-z,noexecstack", "-s",
)  # fmt: skip


def file_name() -> str:
    sources = sorted(SOURCE.glob("*.[ch]"))
    return f"init-{platform.machine()}-{native.digest(sources, ' '.join(FLAGS))}"


def build(target: Path) -> None:
    """Compile the program for this machine. Raises UserError."""
    otherwise = (
        f"no sandbox init for {platform.machine()} is shipped and no C compiler was found to build it: "
        "install one (apt-get install gcc)"
    )
    compiler = native.compiler("CC", "gcc", "clang", otherwise)
    native.compiled([compiler, *FLAGS, "-o", str(target), str(SOURCE / "main.c")], "the sandbox's init")


@functools.cache
def locate() -> Path:
    """The program for this machine: shipped, cached, or built now.

    Raises:
        UserError: it has to be built and cannot be.
    """
    return native.located(SOURCE, file_name(), build)


if __name__ == "__main__":
    native.rebuilt(SOURCE, file_name(), f"init-{platform.machine()}-*", build)
