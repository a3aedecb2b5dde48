"""What all sandboxes of a pool may write, together: no more than the host's disk has left.

The pool's file is sparse and grows as they write. Two quota groups of btrfs hold it: one over all live roots,
and one over these and all channels, so that commands go on where roots are full. With simple quotas a group
counts what its members wrote, for as long as anything refers to it. Its limit is what it counts now and what
the disk has left now: of that the kernel counts whatever is written, so nothing has to be looked at again
until the disk changes by something else. Far from the reserve a change by a quarter is waited for; near it
there is a look each time, which brings to the disk what lies in memory only.

Blocks of deleted files go back to the disk some time later. Near the reserve they must at once (`spare`),
else what is deleted and written again takes blocks twice for a while.

Source: Documentation of btrfs, "Quota groups", simple quotas; fs/btrfs/qgroup.c.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from windtunnel.agents.sandbox.files import btrfs
from windtunnel.agents.sandbox.policy.room import CHANNEL, Ceiling

ROOTS, ALL = 1 << 48, 2 << 48
"""Quota groups: of all live roots, and of these and all channels."""


class CommonBound:
    """``folder``: the pool; ``lives`` and ``channels``: its folders of live roots and of channels. Raises
    OSError, as all of it does."""

    def __init__(self, folder: Path, lives: Path, channels: Path) -> None:
        self._folder, self._channels = folder, channels
        self._lock = threading.Lock()
        self._seen: Ceiling | None = None
        self._bounds = {ROOTS: btrfs.LAST, ALL: btrfs.LAST}
        self._more, self._sparing = 0, False
        for number in (ROOTS, ALL):
            btrfs.group(folder, number)
        btrfs.belongs(folder, ROOTS, ALL)
        for parent, number in ((lives, ROOTS), (channels, ALL)):
            for each in parent.iterdir():
                with suppress(FileNotFoundError):  # removed meanwhile, by another process
                    btrfs.belongs(folder, btrfs.subvolume(each).id, number)

    def root(self, path: Path) -> None:
        """A live root that is made counts from now on."""
        btrfs.belongs(self._folder, btrfs.subvolume(path).id, ROOTS)

    def channel(self, path: Path, *, new: bool) -> None:
        """A channel that is made counts from now on. ``new``: of a sandbox that had none; its room comes on
        top, since it was not there to be counted at the last look."""
        btrfs.belongs(self._folder, btrfs.subvolume(path).id, ALL)
        if new:
            with self._lock:
                self._bounds[ALL] = min(self._bounds[ALL] + CHANNEL, btrfs.LAST)
                self._hold()

    @contextmanager
    def raised(self, more: int) -> Iterator[None]:
        """So many bytes more may be written within the block."""
        with self._lock:
            self._more += more
            self._hold()
        try:
            yield
        finally:
            with self._lock:
                self._more -= more
                self._hold()

    def look(self, disk: Callable[[int, bool], Ceiling]) -> tuple[Ceiling | None, Ceiling]:
        """Hold what ``disk`` says of so many sandboxes, and of whether the reserve was near at the last look;
        what held before (None: nobody has looked), and what holds now."""
        with self._lock:
            count, before = len(os.listdir(self._channels)), self._seen
            close = before is not None and before.near
            now = disk(count, close)
            if before is not None and not (close or now.near or _moved(before.left, now.left)):
                return before, before
            btrfs.sync(self._folder)
            # first what they use, then what is free: what is written in between counts twice, never not
            roots, both = (btrfs.counted_in(self._folder, each) for each in (ROOTS, ALL))
            now = disk(count, close)
            # what channels have in any case they have once, and not once more at every look
            most = roots + now.left
            self._bounds = {ROOTS: most, ALL: most + max(both - roots, now.channels)}
            self._hold()
            self._seen = now
            return before, now

    def spare(self, on: bool) -> None:
        """Whether blocks are given back to the disk at once. Takes long where much is to be given back."""
        if on != self._sparing:
            btrfs.frugal(self._folder, on)
            self._sparing = on

    def _hold(self) -> None:
        for number, most in self._bounds.items():
            btrfs.limit_group(self._folder, number, min(most + self._more, btrfs.LAST))


def _moved(before: int, now: int) -> bool:
    return abs(now - before) > before // 4
