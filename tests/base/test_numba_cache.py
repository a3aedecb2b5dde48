"""Compiled functions are kept for the state of the package that they were compiled in, and for no other."""

from __future__ import annotations

import os
from pathlib import Path

from windtunnel.base.numba_cache import KEPT, cache_of


def test_each_state_of_a_package_has_a_cache_of_its_own(tmp_path: Path) -> None:
    package, folder = tmp_path / "package", tmp_path / "numba"
    (package / "inner").mkdir(parents=True)
    (package / "kernel.py").write_text("one")
    layout = package / "inner" / "layout.py"
    layout.write_text("two")
    first = cache_of(package, folder)
    assert first.is_dir() and cache_of(package, folder) == first

    layout.write_text("three")  # the kernel's own file is as it was
    os.utime(layout, ns=(0, 0))
    second = cache_of(package, folder)
    assert second != first
    os.utime(layout, ns=(1, 1))  # as long, but of another time
    assert cache_of(package, folder) not in (first, second)

    other = tmp_path / "other"
    (other / "inner").mkdir(parents=True)
    (other / "kernel.py").write_text("one")
    assert cache_of(other, folder) != first


def test_old_states_are_thrown_away_and_other_installations_left_alone(tmp_path: Path) -> None:
    package, folder = tmp_path / "package", tmp_path / "numba"
    foreign = folder / "00000000-1"
    package.mkdir()
    foreign.mkdir(parents=True)
    caches = []
    for number in range(KEPT + 3):
        (package / "kernel.py").write_text("x" * number)
        caches.append(cache_of(package, folder))
        os.utime(caches[-1], ns=(number, number))
    assert [cache.exists() for cache in caches] == [False] * 3 + [True] * KEPT
    assert foreign.exists()
