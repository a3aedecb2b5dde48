"""Where the compiled launcher and init is; run as a module, builds it anew.

It is one static program without a C library (source in ``init/``), so one build serves every Linux of a
processor. The build carries a digest of the source in its name; on a processor for which none is shipped it
is compiled once with the system's C compiler and kept in the user's cache.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

from windtunnel.base import paths
from windtunnel.base.errors import UserError

SOURCE = Path(__file__).parent / "init"
FLAGS = (
    "-Os", "-static", "-nostdlib", "-ffreestanding", "-fno-builtin", "-fno-stack-protector", "-fno-pie",
    "-no-pie", "-fno-asynchronous-unwind-tables", "-Wall", "-Wextra", "-Werror", "-Wl,--build-id=none",
    "-Wl,-z,noexecstack", "-s",
)  # fmt: skip


def source_digest() -> str:
    """A digest of the source and of how it is built, which a build carries in its file name."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted(SOURCE.glob("*.[ch]")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def file_name() -> str:
    return f"init-{platform.machine()}-{source_digest()}"


def build(target: Path) -> None:
    """Compile the program for this machine.

    Raises:
        UserError: there is no C compiler, or the compilation fails.
    """
    compiler = shutil.which(os.environ.get("CC", "gcc")) or shutil.which("clang")
    if compiler is None:
        raise UserError(
            f"no sandbox init for {platform.machine()} is shipped and no C compiler was found to build it: "
            "install one (apt-get install gcc)"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    # built beside the target and renamed, so that two processes building at once do not see half a file
    part = target.with_suffix(f".{os.getpid()}.part")
    done = subprocess.run(
        [compiler, *FLAGS, "-o", str(part), str(SOURCE / "main.c")], capture_output=True, text=True
    )
    if done.returncode != 0:
        raise UserError(f"building the sandbox's init failed: {done.stderr.strip()[-800:]}")
    os.replace(part, target)


@functools.cache
def locate() -> Path:
    """The program for this machine: shipped, cached, or built now.

    Raises:
        UserError: it has to be built and cannot be.
    """
    for folder in (SOURCE, paths.cache()):
        if (folder / file_name()).exists():
            return folder / file_name()
    build(paths.cache() / file_name())
    return paths.cache() / file_name()


def main() -> None:
    """``python -m windtunnel.agents.sandbox.live.machine.native``: rebuild what is shipped beside the
    source."""
    for old in SOURCE.glob(f"init-{platform.machine()}-*"):
        old.unlink()
    build(SOURCE / file_name())
    print(f"built {file_name()}")


if __name__ == "__main__":
    main()
