"""The compiled launcher and init, one static program (source in ``init/``); as a module, builds it anew."""

from __future__ import annotations

from pathlib import Path

from windtunnel.base.native import Freestanding

FLAGS = (
    "-Os", "-static", "-nostdlib", "-ffreestanding", "-fno-builtin", "-fno-stack-protector", "-fno-pie",
    "-no-pie", "-fno-asynchronous-unwind-tables", "-Wall", "-Wextra", "-Werror", "-Wl,--build-id=none",
    "-Wl,-z,noexecstack", "-s",
)  # fmt: skip
PROGRAM = Freestanding(Path(__file__).parent / "init" / "main.c", "init", "", FLAGS, "sandbox init")

if __name__ == "__main__":
    PROGRAM.rebuild()
