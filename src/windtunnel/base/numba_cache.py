"""Where compiled functions are kept: apart for each state of the package.

Numba takes a function from its cache as long as the file that it stands in is as old and as long as it was.
What it calls, or which records it reads, may have changed all the same, as in another release whose files
all bear the same date: then it reads memory by a layout that is no more. Whoever sets ``NUMBA_CACHE_DIR``
answers for that himself.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from pathlib import Path

import numba

from windtunnel.base import paths

KEPT = 4
"""States of one installation, the newest."""


def place() -> None:
    """Have Numba keep what it compiles from now on in the folder of the package's state."""
    if not numba.config.CACHE_DIR:
        # Where no folder can be made Numba finds another place, or compiles each time.
        with contextlib.suppress(OSError, RuntimeError):
            package = Path(__file__).resolve().parents[1]
            numba.config.CACHE_DIR = str(cache_of(package, paths.cache() / "numba"))


def cache_of(package: Path, folder: Path) -> Path:
    """The cache for the state that ``package`` is in; of older ones in ``folder`` `KEPT` stay."""
    files = [(path.relative_to(package), path.stat()) for path in sorted(package.rglob("*.py"))]
    listing = "".join(f"{name} {status.st_mtime_ns} {status.st_size}\n" for name, status in files)
    where = hashlib.sha256(str(package).encode()).hexdigest()[:8]
    cache = folder / f"{where}-{hashlib.sha256(listing.encode()).hexdigest()[:16]}"
    if not cache.exists():
        cache.mkdir(parents=True, exist_ok=True)
        states = sorted(folder.glob(f"{where}-*"), key=lambda path: path.stat().st_mtime)
        for old in states[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    return cache
