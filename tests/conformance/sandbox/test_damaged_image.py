"""Bytes of a process image are flipped on the disk, below a host that runs: nothing runs on them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agents.sandbox.hurt import flip_image
from windtunnel.agents.sandbox.errors import SandboxError

pytestmark = pytest.mark.root

HOLDS = 'python3 -c \'import os, time; x = os.urandom({}); open("/tmp/ready", "w"); time.sleep(1000)\' &'
READY = " until [ -e /tmp/ready ]; do sleep 0.01; done; rm /tmp/ready"


def write(file: Path, at: int, data: bytes) -> None:
    """As ``dd conv=notrunc`` does it."""
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(data)


def test_flipped_bytes_are_told_at_a_restore_and_not_built_upon(host: Any, make: Callable[..., Any]) -> None:
    box = make()
    box.run(HOLDS.format(3_000_000) + READY)
    whole = box.checkpoint(full=True)
    box.run(HOLDS.format(1_000_000) + READY)
    flipped = box.checkpoint(full=True)
    flip_image(host.context.store, flipped.image.id)
    host.context.store.copies.forget_all()
    with pytest.raises(SandboxError, match=rf"{flipped.id}.* damaged.*sandbox log {box.name}"):
        box.restore()

    # a copy in the cache that rots, which moves no time, is noticed before anything runs on it; those of
    # before went when damage was found
    box.restore(whole.id)
    copy = max((host.home.pages / "raw" / whole.image.id).iterdir(), key=lambda file: file.stat().st_size)
    stamps = copy.stat()
    rotten = os.urandom(16)
    write(copy, stamps.st_size // 2, rotten)
    os.utime(copy, ns=(stamps.st_atime_ns, stamps.st_mtime_ns))
    assert not [lack for lack in box.restore(whole.id).lacks if lack.kind == "processes"]
    assert "os.urandom(3000000)" in " ".join(box.info().processes)
    assert rotten not in copy.read_bytes()
    box.run(HOLDS.format(500_000) + READY)
    after = box.checkpoint(full=True)
    assert box.restore().checkpoint == after.id
