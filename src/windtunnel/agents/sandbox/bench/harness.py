"""What every section stands on: a home folder of its own, hosts on it, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import psutil

from windtunnel.agents.sandbox.live.criu import find_criu
from windtunnel.agents.sandbox.live.criu.process import is_tmpfs
from windtunnel.agents.sandbox.live.host import Host
from windtunnel.agents.sandbox.live.place import Home
from windtunnel.agents.sandbox.policy import Retention
from windtunnel.base import paths
from windtunnel.bench.measure import scratch

T = TypeVar("T")
KEEP_ALL = Retention(keep=100_000)


def missing() -> str:
    """Why real sandboxes cannot be measured here, in a sentence; empty when they can."""
    if os.geteuid() != 0:
        return "left out: real sandboxes need root"
    if find_criu() is None:
        return "left out: process images need CRIU; 'windtunnel sandbox setup' installs it"
    return ""


@contextlib.contextmanager
def own_home() -> Iterator[Path]:
    """A home folder on a disk, removed at the end with all that ran in it."""
    with scratch(_disk()) as folder:
        # what others have still to write is not this section's
        os.sync()
        try:
            yield folder
        finally:
            with Host(folder, policy="conversation") as host:
                for info in host.boxes():
                    host.remove(info.name)
                host.gc()
            shutil.rmtree(folder)  # and whatever cannot go is told


def _disk() -> Path:
    """A folder for temporary files that does not lie in memory."""
    usual = Path(tempfile.gettempdir())
    if not is_tmpfs(str(usual)):
        return usual
    paths.cache().mkdir(parents=True, exist_ok=True)
    return paths.cache()


@contextlib.contextmanager
def opened(home: Path, **options: Any) -> Iterator[Host]:
    """A host on ``home`` whose sandboxes end with it, and whose retention forgets nothing unless told."""
    with Host(home, **{"retention": KEEP_ALL, **options}) as host:
        try:
            yield host
        finally:
            for info in host.boxes():
                host.remove(info.name)


_numbers = count(1)


def new_name(stem: str) -> str:
    """A name that no other sandbox of this run has."""
    return f"{stem}-{next(_numbers)}"


def processes_of(home: Home, box: str) -> list[psutil.Process]:
    """CRIU programs that this process runs for one sandbox: they name its control group."""
    mark = f"windtunnel-{home.tag}/{box}"
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.name() == "criu" and any(word.endswith(mark) for word in child.cmdline()):
                found.append(child)
    return found


class MemoryMeter:
    """The most memory that this process and its helpers held within the block; sandboxes are no helpers."""

    def __init__(self, every: float = 0.2) -> None:
        self.peak = 0
        self._every = every
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="bench-memory", daemon=True)

    def __enter__(self) -> MemoryMeter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        own = psutil.Process()
        while True:
            held = 0
            for process in (own, *own.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    held += process.memory_info().rss
            self.peak = max(self.peak, held)
            if self._end.wait(self._every):
                return
