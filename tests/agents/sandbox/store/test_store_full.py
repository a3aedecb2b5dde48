"""A disk that is full: what was stored is unharmed, and nothing half is left."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from pathlib import Path

import pytest

from agents.sandbox.hurt import fill
from agents.sandbox.store.image_making import content, damage, frames, image, keep
from windtunnel.agents.sandbox.store import CheckpointStore
from windtunnel.store.objects import ObjectError


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    """The kernel itself refuses, in the middle of a write."""
    store = CheckpointStore(tmp_path / "store")
    keep(store, "a", image(tmp_path / "a", 1, 2, 3))
    image(tmp_path / "b", *range(1, 150))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(ObjectError, match="the checkpoint cannot be stored"):
            keep(store, "b", tmp_path / "b")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert (store.images(), frames(store), damage(store, "a")) == (["a"], 1, [])
    keep(store, "b", tmp_path / "b")
    assert damage(store, "b") == []


@pytest.mark.root
def test_a_file_system_that_is_full(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    small = tmp_path / "small"
    small.mkdir()
    image(tmp_path / "a", *range(1, 80))
    image(tmp_path / "b", *range(1000, 1900))
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", small], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs to mount a tmpfs")
    try:
        store = CheckpointStore(small / "store")
        keep(store, "a", tmp_path / "a")
        store.settle(whole=True)
        with pytest.raises(ObjectError, match=r"No space left on device.*what was stored before is unharmed"):
            keep(store, "b", tmp_path / "b")
        assert (store.images(), damage(store, "a")) == (["a"], [])
        store.close()
        store = CheckpointStore(small / "store")
        filling = fill(small)
        with pytest.raises(ObjectError, match="No space left"):
            store.materialise("a", small / "out")
        assert not (small / "out").exists()
        filling.unlink()
        store.materialise("a", small / "out")
        assert content(small / "out") == content(tmp_path / "a")
        store.materialise("a", tmp_path / "out")
        assert content(tmp_path / "out") == content(tmp_path / "a")
        store.close()
    finally:
        subprocess.run(["umount", small], check=True)
