"""Roots of sandboxes where there is no btrfs: whole trees, copied.

Blocks are shared where the file system can. A snapshot takes each file that is as in the sandbox's last
snapshot from there, by a hard link: a file of a snapshot is never written again. What differs is found by
comparing the two trees, bytes included, since no time of a file says that it was not changed.

Without root nothing is mounted: ``mount`` gives the folder itself, owners are the user's, and devices are
absent.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

from windtunnel.agents.sandbox.files import archive
from windtunnel.agents.sandbox.files.pool import Pool, checked, faults
from windtunnel.agents.sandbox.files.tree import Comparison, Copier, remove
from windtunnel.agents.sandbox.model import FileChange
from windtunnel.base import atomic
from windtunnel.linux.system import sync_file_system

BASE = "base"
"""Beside a live root: the tree of the pool that it was last the same as."""


class CopyPool(Pool):
    """Live roots and snapshots are folders with a ``tree``, whose own mode may be any."""

    kind = "copy"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._may_mount = os.geteuid() == 0

    def _make(self, path: Path) -> None:
        path.mkdir(mode=0o700)

    def _publish(self, path: Path, name: Path) -> None:
        os.rename(path, name)

    def _remove(self, path: Path) -> None:
        remove(path)

    def create(self, box: str, image: str, limit: int | None = None) -> None:
        self._begin(box, self._image(image))

    def clone(self, box: str, snapshot: str, limit: int | None = None) -> None:
        self._begin(box, self._tree(self._snap(snapshot)))

    def _begin(self, box: str, origin: Path) -> None:
        """The live root of ``box`` is a copy of ``origin``, in place of what it was."""
        live = self._lives / checked(box)
        with faults(f"sandbox {box!r} cannot get a root"), self._draft(box) as path:
            self._tree(path).mkdir()
            Copier().tree(str(origin), str(self._tree(path)))
            (path / BASE).write_text(str(origin.relative_to(self._folder)), encoding="utf-8")
            self.unmount(box)
            self._discard(live)
            os.rename(path, live)
            self._discard(self._channels / box)
            (self._channels / box).mkdir(mode=0o700)

    def snapshot(self, box: str, snapshot: str) -> int:
        live, there = self._live(box), self._unused(snapshot)
        with faults(f"no snapshot of sandbox {box!r}"), self._draft(snapshot) as draft:
            root = str(self._tree(live))
            base = self._folder / (live / BASE).read_text(encoding="utf-8")
            changed = {each.path for each in self._differences(base, self._tree(live))}
            linked: set[int] = set()

            def reuse(path: str, about: os.stat_result) -> str | None:
                inside = path[len(root) :]
                if about.st_nlink > 1 or inside in changed:
                    return None
                with suppress(OSError):  # without root, a folder that is shut
                    same = os.lstat(f"{base}{inside}").st_ino
                    # names of one file may have become files of their own
                    if same not in linked:
                        linked.add(same)
                        return f"{base}{inside}"
                return None

            self._tree(draft).mkdir()
            copier = Copier(reuse=reuse)
            copier.tree(root, str(self._tree(draft)))
            os.rename(draft, there)
        with suppress(OSError):  # an older tree shares less, and is as right
            atomic.replace(live / BASE, str(self._tree(there).relative_to(self._folder)).encode())
        return copier.bytes

    def _compared(self, first: Path, second: Path) -> list[FileChange]:
        return self._differences(self._tree(first), self._tree(second))

    @staticmethod
    def _differences(first: Path, second: Path) -> list[FileChange]:
        compared = Comparison(
            first, second, lambda path, old, new: (old.st_dev, old.st_ino) == (new.st_dev, new.st_ino)
        )
        compared.trees()
        return compared.result()

    def _tree(self, path: Path) -> Path:
        return path / "tree"

    def bytes_new(self, snapshot: str, older: str = "") -> int:
        """Bytes on disk of the files that no other snapshot shares."""
        with faults(f"the size of snapshot {snapshot!r} cannot be read"):
            files = _files(self._tree(self._snap(snapshot)))
            return sum(about.st_blocks * 512 for about in files if about.st_nlink == 1)

    def receive(self, snapshot: str, source: IO[bytes]) -> None:
        there = self._unused(snapshot)
        with faults(f"snapshot {snapshot!r} cannot be received"), self._draft(snapshot) as path:
            self._tree(path).mkdir(mode=0o755)
            archive.receive(self._tree(path), source)
            os.rename(path, there)

    def sync(self, snapshot: str) -> None:
        with faults(f"snapshot {snapshot!r} cannot be brought to the disk"):
            sync_file_system(self._snap(snapshot))


def _files(tree: Path) -> Iterator[os.stat_result]:
    for folder, _, names in os.walk(tree):
        for name in names:
            about = os.lstat(os.path.join(folder, name))
            if stat.S_ISREG(about.st_mode):
                yield about
