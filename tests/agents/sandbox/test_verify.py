"""Bytes are flipped on the disk, from outside, below a host that runs: it is found, named, not built on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hurt import flip_image, flip_manifest

from windtunnel.agents.sandbox.errors import SandboxError
from windtunnel.agents.sandbox.host import Host
from windtunnel.agents.sandbox.model import SandboxSpec
from windtunnel.agents.sandbox.restore import verify
from windtunnel.base.errors import UserError

pytestmark = pytest.mark.root

HOLDS = 'python3 -c \'import os, time; x = os.urandom({}); open("/tmp/ready", "w"); time.sleep(1000)\' &'
READY = " until [ -e /tmp/ready ]; do sleep 0.01; done; rm /tmp/ready"


def places_of(word: bytes, file: Path) -> list[int]:
    """Where it stands in the parts of a sparse file that hold anything."""
    found, buffer = [], bytearray(1 << 20)
    with file.open("rb") as opened:
        at = end = 0
        while True:
            try:
                at = os.lseek(opened.fileno(), max(at, end), os.SEEK_DATA)
            except OSError:
                return found
            end = os.lseek(opened.fileno(), at, os.SEEK_HOLE)
            while at < end:
                count = os.preadv(opened.fileno(), [buffer], at)
                if (inside := buffer.find(word, 0, count)) >= 0:
                    found.append(at + inside)
                at += count if count < len(buffer) else count - len(word)


def write(file: Path, at: int, data: bytes) -> None:
    """As ``dd conv=notrunc`` does it."""
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(data)


def test_flipped_bytes_are_found_told_and_not_built_upon(host: Any, make: Callable[..., Any]) -> None:
    box = make()
    box.run(HOLDS.format(3_000_000) + READY)
    whole = box.checkpoint(full=True)
    box.run(HOLDS.format(1_000_000) + READY)
    flipped = box.checkpoint(full=True)
    flip_image(host.context.store, flipped.image.id)

    report = host.verify(box.name)
    assert {whole.id, flipped.id} <= set(report.checkpoints)
    (damage,) = report.damaged
    assert (damage.checkpoint, damage.box, damage.instead) == (flipped.id, box.name, whole.id)
    assert "store.db is damaged" in damage.what[0] and report.files == "checksums of btrfs"
    assert host.verify(whole.id[:-2]).damaged == ()
    with pytest.raises(SandboxError, match=rf"{flipped.id}.* damaged.*{whole.id}, .* is whole"):
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
    assert [one.checkpoint for one in host.verify(box.name).damaged] == [flipped.id]
    assert box.restore().checkpoint == after.id
    with pytest.raises(UserError, match="'nothing' is not known"):
        host.verify("nothing")
    gone = verify(host.context, ["20200101-000000-abcdef"])
    assert gone.checkpoints == gone.damaged == (), "one that is dropped meanwhile is not damaged"


def test_flipped_bytes_of_files_and_manifests_are_found(new_home: Path, small_root: Path) -> None:
    with Host(new_home, pool_size=384 << 20) as host:  # all of it is searched
        box = host.create(SandboxSpec("a", image=str(small_root)))
        before = box.checkpoint()
        word = os.urandom(8).hex()
        box.run(f"for i in $(seq 500); do echo {word} $i; done > /workspace/file")
        made = box.checkpoint()
        files = host.home.path / "pool.img"
        found = places_of(f"{word} 300".encode(), files)
        assert found
        for at in found:
            write(files, at, b"!")
        (damage,) = host.verify(box.name).damaged
        assert (damage.checkpoint, damage.instead) == (made.id, before.id)
        assert damage.what == ("/workspace/file: Input/output error",)

        flip_manifest(host.context.store, made.id)
        (damage,) = host.verify(made.id).damaged
        assert (damage.checkpoint, damage.box, damage.instead) == (made.id, "", "")
        assert f"manifest {made.id}" in damage.what[0]
        assert made.id in {one.checkpoint for one in host.verify().damaged}
