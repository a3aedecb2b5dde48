"""Whether a disk limit holds against a sandbox that wants more: in one file, in files without bytes, in a
subvolume of its own, and across restores and forks of a full one.

What is used is seen from the host, beside the accounting that holds the limit: the blocks of the files in the
tree, and for files without bytes what the whole pool has grown by.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from benchmarks.agents.sandbox.harness import new_name, opened, own_home
from benchmarks.figures import figure
from benchmarks.harness.rows import Row
from windtunnel.agents.sandbox.live.box import Box
from windtunnel.agents.sandbox.live.host import Host
from windtunnel.agents.sandbox.model import Limits, SandboxSpec

LIMIT = 32 << 20
INODES_LIMIT = 8 << 20
RESTORES, FORKS = 5, 4
FILL = """dd if=/dev/zero of=/workspace/$RANDOM bs=64k
dd if=/dev/zero of=/workspace/tail bs=512"""
EMPTY_FILES = "python3 -c \"[open(f'/workspace/{n}', 'x').close() for n in range(10**6)]\""
SUBVOLUME = (
    "python3 -c \"import fcntl, os, struct; fcntl.ioctl(os.open('/workspace', os.O_RDONLY), 0x5000940e, "
    "bytearray(struct.pack('=q4088s', 0, b'own')))\""
)


def used(root: Path) -> int:
    """Bytes on disk of the files that the sandbox wrote."""
    found = (os.path.join(folder, name) for folder, _, names in os.walk(root / "workspace") for name in names)
    return sum(os.lstat(path).st_blocks * 512 for path in found)


def over(bytes: int, limit: int) -> float:
    """By how many per cent ``bytes`` are more than the limit; less than 0 where they are fewer."""
    return 100 * (bytes / limit - 1)


def quota_rows(quick: bool) -> Iterator[Row]:
    """One sandbox of a small limit after the other; takes some seconds, with or without ``quick``."""
    with own_home() as home, opened(home, pool_size=2 << 30) as host:
        over_by = dict([*_data(host), *_inodes(host)])
        for name, share in over_by.items():
            yield figure("quota", f"disk used over the limit: {name}", "%", round(share, 2))
        highest = round(max(over_by.values()), 2)
        yield figure("quota", "disk used over the limit, highest", "%", highest, "<= 1 %")
        name = "subvolumes that a sandbox made, before and after a restore"
        yield figure("quota", name, "subvolumes", _subvolumes(host), "0")


def _data(host: Host) -> Iterator[tuple[str, float]]:
    def share(box: Box) -> float:
        return over(used(host.context.pool.mount(box.name)), LIMIT)

    box = host.create(SandboxSpec(new_name("quota"), limits=Limits(disk=LIMIT)))
    box.run(FILL)
    yield "one file", share(box)
    full = box.checkpoint(full=True)
    shares = []
    for _ in range(RESTORES):
        box.restore(full.id)
        box.run(FILL)
        shares.append(share(box))
        full = box.checkpoint(full=True)
    yield f"{RESTORES} restores of a full one, each filled again", max(shares)
    forks = host.fork(full.id, FORKS)
    for fork in forks:
        fork.run(FILL)
    yield f"{FORKS} forks of it", max(share(fork) for fork in forks)
    box.run("rm /workspace/*")
    box.checkpoint()
    box.run(FILL)
    yield "deleted and written again", share(box)


def _inodes(host: Host) -> Iterator[tuple[str, float]]:
    pool = host.context.pool
    box = host.create(SandboxSpec(new_name("quota"), limits=Limits(disk=INODES_LIMIT)))
    pool.generation(box.name)
    before = pool.usage()[0]
    box.run(EMPTY_FILES)
    pool.generation(box.name)
    yield "files without bytes", over(pool.usage()[0] - before, INODES_LIMIT)


def _subvolumes(host: Host) -> int:
    """How many of the attempts succeeded."""
    box = host.create(SandboxSpec(new_name("quota")))
    made = int(box.run(SUBVOLUME).exit_code == 0)
    box.restore(box.checkpoint(full=True).id)
    return made + int(box.run(SUBVOLUME).exit_code == 0)
