"""What a live root on btrfs may still write, where it goes on from a snapshot.

With simple quotas the kernel counts for each subvolume what that subvolume wrote, for as long as anything
refers to it. So a root that begins as a snapshot of another begins with nothing counted, and what it deletes
stays counted while an older snapshot has it. What a limit means is what a root *uses*: all that it refers to
and that is newer than its image. Both differ by a number, the root's *offset*: use = count + offset. The
kernel is given the limit less the offset. Whatever is written raises count and use by the same, and nothing
else raises the use; so between two looks the kernel holds the limit.

The offset is known where a root is made: none over an image, the use of the snapshot over a snapshot. It is
looked at again at a snapshot, once the use comes near the limit: the use is then no more than what a search
of the snapshot finds, since what was deleted is not in it. Data are found to the byte. Of the trees a search
shows the items and not the leaves that they lie in; a leaf is taken to be no less than a third full, which is
what the kernel merges by. That is too much for a root of many small files, but count and old offset bound it
as well.

Source: Documentation of btrfs, "Quota groups", simple quotas; fs/btrfs/ctree.c (leaves) and qgroup.c.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from windtunnel.agents.sandbox.files import btrfs
from windtunnel.linux.system import opened

NEAR = 0.9
"""Share of the limit from which on it is looked at what is used indeed."""
LEAST_FILL = 1 / 3
FRESHENED = 512 << 10
"""Bytes that the kernel wants to see free before it makes two small files; it takes a tenth of them."""


@dataclass(frozen=True)
class Account:
    """Of a live root. ``since``: the generation up to which everything is the image's; ``offset``: what it
    uses beyond what the kernel counts; ``limit``: bytes, None for none; ``brought``: bytes that were used
    when it came from another pool, where they cannot be told from the image any more."""

    since: int
    offset: int = 0
    limit: int | None = None
    brought: int = 0

    def hold(self, root: Path, more: int = 0) -> None:
        """Have the kernel hold it, with so many bytes on top. Raises OSError."""
        if self.limit is not None:
            btrfs.limit(root, max(0, self.limit - self.offset) + more)

    def near(self, used: int) -> bool:
        return self.limit is not None and used > NEAR * self.limit


@dataclass(frozen=True)
class Statement:
    """Of a snapshot. ``used``: bytes, never less than it uses; ``counted``: what the kernel had counted then
    for the root that was snapshotted, ``of``; ``brought``: as in `Account`."""

    since: int
    used: int = 0
    counted: int = 0
    of: str = ""
    brought: int = 0

    def looked_at(self, snapshot: Path) -> int:
        """What the snapshot uses, never less; takes as long as it has inodes newer than the image."""
        with opened(snapshot) as given:
            data, _, items = btrfs.newer(given, self.since + 1)
        return min(self.used, self.brought + data + int(items / LEAST_FILL))
