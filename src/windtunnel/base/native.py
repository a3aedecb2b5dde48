"""Programs and libraries that are compiled from source of ours: found by a digest of it, or built.

A build carries the digest in its file name, so one that does not belong to the source is never used. What is
shipped lies beside the source; where nothing is shipped it is compiled once with the system's
compiler and kept in the user's cache.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from windtunnel.base import atomic, paths
from windtunnel.base.errors import UserError

Build = Callable[[Path], None]
"""Compiles into a file of that name. Raises UserError when it cannot."""


def digest(sources: Iterable[Path], flags: str = "") -> str:
    """Of the content of files and of how they are compiled."""
    sha = hashlib.sha256(flags.encode())
    for path in sources:
        sha.update(path.read_bytes())
    return sha.hexdigest()[:12]


def compiler(variable: str, usual: str, other: str, otherwise: str) -> str:
    """The compiler that the environment's ``variable`` names, else ``usual``, else ``other``.

    Raises:
        UserError: there is none; says ``otherwise``.
    """
    program = shutil.which(os.environ.get(variable, usual)) or shutil.which(other)
    if program is None:
        raise UserError(otherwise)
    return program


def compiled(command: list[str], what: str) -> None:
    """Run a compiler. Raises UserError with the first error that it tells, in one line."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        first = next((line for line in lines if "error" in line), lines[-1] if lines else "nothing was said")
        raise UserError(f"building {what} failed: {first[:800]}")


def located(folder: Path, name: str, build: Build) -> Path:
    """The build ``name``: shipped in ``folder``, cached, or built now. Raises UserError as ``build`` does."""
    cached = paths.cache() / name
    for path in (folder / name, cached):
        if path.exists():
            return path
    built(cached, build)
    return cached


def built(target: Path, build: Build) -> None:
    """Build beside ``target`` and rename, so that two processes building at once do not see half a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic.replacing(target) as part:
        build(part)


def rebuilt(folder: Path, name: str, others: str, build: Build) -> None:
    """Build what is shipped in ``folder`` as ``name`` anew, and remove what else fits ``others``."""
    built(folder / name, build)
    for old in folder.glob(others):
        if old.name != name:
            old.unlink()
    print(f"built {name}")


@dataclass(frozen=True)
class Freestanding:
    """A program or library in C without a C library, so that one build serves every Linux of a processor.

    ``main`` is compiled; every C file of its folder counts in the digest, and so do ``others`` that it
    includes. ``what`` names it in messages.
    """

    main: Path
    name: str
    ending: str
    flags: tuple[str, ...]
    what: str
    others: tuple[Path, ...] = ()

    @property
    def folder(self) -> Path:
        return self.main.parent

    def file_name(self) -> str:
        sources = digest([*sorted(self.folder.glob("*.[ch]")), *self.others], " ".join(self.flags))
        return f"{self.name}-{platform.machine()}-{sources}{self.ending}"

    def build(self, target: Path) -> None:
        """Compile it for this machine. Raises UserError."""
        otherwise = (
            f"no {self.what} for {platform.machine()} is shipped and no C compiler was found to build it: "
            "install one (apt-get install gcc)"
        )
        program = compiler("CC", "gcc", "clang", otherwise)
        compiled([program, *self.flags, "-o", str(target), str(self.main)], f"the {self.what}")

    @functools.cache  # noqa: B019 (there are as many as modules that make one)
    def locate(self) -> Path:
        """The build for this machine: shipped, cached, or built now.

        Raises:
            UserError: it has to be built and cannot be.
        """
        return located(self.folder, self.file_name(), self.build)

    def rebuild(self) -> None:
        """Build what is shipped anew, and remove older builds for this processor."""
        rebuilt(self.folder, self.file_name(), f"{self.name}-{platform.machine()}-*{self.ending}", self.build)
