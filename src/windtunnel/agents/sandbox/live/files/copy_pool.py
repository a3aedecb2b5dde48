"""Roots of sandboxes where there is no btrfs: an overlay over the image, whose upper folder is copied.

A *layer* is what a sandbox has of its own. With overlayfs it holds only what differs from the image (with
white-outs and opaque folders, as the kernel keeps them); where overlays cannot be mounted it is a whole
tree. A snapshot copies the layer, sharing blocks where the file system can, and takes files that did not
change since the sandbox's last snapshot from there by a hard link: a file in a snapshot is never written
again.

Without root nothing is mounted: ``mount`` gives the folder itself, owners are the user's, and devices are
absent.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from windtunnel.agents.sandbox.errors import PoolError
from windtunnel.agents.sandbox.live.files import overlay, shared, stream
from windtunnel.agents.sandbox.live.files.compare import Comparison
from windtunnel.agents.sandbox.live.files.known import Known, load, save, version
from windtunnel.agents.sandbox.live.files.shared import Layout, checked, draft, faults, names
from windtunnel.agents.sandbox.live.files.tree import Copier, remove
from windtunnel.agents.sandbox.model import FileChange
from windtunnel.linux import mounts
from windtunnel.linux.system import sync_file_system


class CopyPool:
    """See ``Pool``. Live roots and snapshots are folders with ``layer``, and ``image``: the image's name
    where the layer lies over one."""

    kind = "copy"

    def __init__(self, folder: Path) -> None:
        self._at = Layout(folder)
        with faults(f"the pool {folder} cannot be used"):
            self._at.make()
            self._mounts = os.geteuid() == 0
            self._overlay = self._mounts and overlay.works(self._at)

    def import_image(self, source: str, progress: Callable[[str], None] | None = None) -> str:
        return shared.imported(self._at, source, progress, _folder, os.rename, remove)

    def images(self) -> list[str]:
        return names(self._at.images)

    def create(self, box: str, image: str) -> None:
        origin = self._at.found(self._at.images, image, "image")
        if self._overlay:
            self._begin(box, None, image, "")
        else:
            self._begin(box, origin, "", f"images/{image}")

    def clone(self, box: str, snapshot: str) -> None:
        origin = self._snap(snapshot)
        self._begin(box, origin / "layer", _image_of(origin), f"snaps/{snapshot}/layer")

    def _begin(self, box: str, layer: Path | None, image: str, base: str) -> None:
        """The live layer of ``box`` is a copy of ``layer`` (None: empty), in place of what it was."""
        checked(box)
        with (
            faults(f"sandbox {box!r} cannot get a root"),
            draft(self._at, box, _folder, remove) as made,
        ):
            for name in ("layer", "work"):
                (made / name).mkdir(mode=0o755)
            (made / "image").write_text(image, encoding="utf-8")
            if layer is not None:
                Copier().tree(str(layer), str(made / "layer"))
            elif image:
                # a root that differs from its image in nothing has its mode and owner too
                shutil.copystat(self._at.images / image, made / "layer")
            save(made, Known(base, _versions(made / "layer") if base else {}))
            self.unmount(box)
            self._discard(self._at.live / box)
            os.rename(made, self._at.live / box)

    def _discard(self, path: Path) -> None:
        old = self._at.discarded(path)
        if old is not None:
            remove(old)

    def _live(self, box: str) -> Path:
        return self._at.found(self._at.live, box, "root of sandbox")

    def _snap(self, snapshot: str) -> Path:
        return self._at.found(self._at.snaps, snapshot, "snapshot")

    def mount(self, box: str) -> Path:
        live = self._live(box)
        if not self._mounts:
            return live / "layer"
        image = _image_of(live)
        # an overlay does not show its upper folder: the name of what is mounted says whose it is
        label = f"windtunnel-{live.stat().st_ino}"
        with faults(f"the root of sandbox {box!r} cannot be mounted"):
            if not image:
                return shared.visible(
                    self._at,
                    box,
                    lambda point: os.path.samefile(point, live / "layer"),
                    lambda point: mounts.bind(live / "layer", point, shared.FLAGS),
                )
            return shared.visible(
                self._at,
                box,
                lambda point: any(each.source == label for each in mounts.at(point)),
                lambda point: overlay.mount(
                    label, point, [self._at.images / image], live / "layer", live / "work"
                ),
            )

    def unmount(self, box: str) -> None:
        checked(box)
        if self._mounts:
            with faults(f"the root of sandbox {box!r} cannot be unmounted"):
                shared.hidden(self._at, box)

    def snapshot(self, box: str, snapshot: str) -> int:
        live, there = self._live(box), self._at.snaps / checked(snapshot)
        if there.exists():
            raise PoolError(f"there is a snapshot {snapshot!r} in the pool already")
        with faults(f"no snapshot of sandbox {box!r}"), draft(self._at, snapshot, _folder, remove) as made:
            before, after = load(live), Known(f"snaps/{snapshot}/layer", {})
            layer, base = str(live / "layer"), str(self._at.folder / before.base)

            def reuse(path: str, about: os.stat_result) -> str | None:
                inside = path[len(layer) :]
                if about.st_nlink > 1:
                    return None
                after.files[inside] = version(about)
                return base + inside if before.has(inside, about) else None

            (made / "layer").mkdir()
            (made / "image").write_text(_image_of(live), encoding="utf-8")
            copier = Copier(reuse=reuse)
            copier.tree(layer, str(made / "layer"))
            os.rename(made, there)
            # when this fails the older note still holds: every entry of it is checked against the file
            save(live, after)
        return copier.bytes

    def drop_box(self, box: str) -> None:
        self.unmount(box)
        with faults(f"the root of sandbox {box!r} cannot be removed"):
            self._discard(self._at.live / checked(box))

    def drop_snapshot(self, snapshot: str) -> None:
        with faults(f"snapshot {snapshot!r} cannot be removed"):
            self._discard(self._at.snaps / checked(snapshot))

    def snapshots(self) -> list[str]:
        return names(self._at.snaps)

    def changed(self, older: str, newer: str | None, box: str | None = None) -> list[FileChange]:
        first = self._snap(older)
        if newer is not None:
            second, known = self._snap(newer), None
        elif box is not None:
            second = self._live(box)
            known = load(second)
        else:
            raise PoolError("to say what changed, name a newer snapshot or the sandbox")
        before, after = str(first / "layer"), str(second / "layer")
        trusted = known is not None and known.base == f"snaps/{older}/layer"

        def untouched(inside: str) -> bool:
            """Whether both layers have the same file at a path, told without reading it."""
            try:
                one, other = os.lstat(before + inside), os.lstat(after + inside)
            except OSError:
                return False
            if stat.S_ISDIR(one.st_mode) or stat.S_ISDIR(other.st_mode):
                return False
            if (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino):
                return True
            return trusted and known is not None and known.has(inside, other)

        with faults(f"what changed since {older!r} cannot be read"), ExitStack() as stack:
            old, new = stack.enter_context(self._view(first)), stack.enter_context(self._view(second))
            compared = Comparison(old, new, lambda path, one, other: untouched(path))
            if _image_of(first) and _image_of(first) == _image_of(second):
                for inside, deep in overlay.touched(Path(before), Path(after), untouched):
                    compared.entry(inside, deep=deep)
            else:
                compared.trees()
            return compared.result()

    @contextmanager
    def _view(self, tree: Path) -> Iterator[Path]:
        """The whole tree that a live root or a snapshot stands for."""
        image = _image_of(tree)
        if not image:
            yield tree / "layer"
            return
        lower = [tree / "layer", self._at.images / image]
        point = shared.view(self._at, lambda point: overlay.mount("windtunnel-view", point, lower))
        try:
            yield point
        finally:
            shared.hidden(self._at, point.name)

    def generation(self, box: str) -> int:
        return -1

    def find_new(self, box: str, generation: int) -> list[str] | None:
        return None

    def set_limit(self, box: str, bytes: int | None) -> str:
        return "" if bytes is None else "the size of the root is not bounded: that needs a btrfs pool"

    def bytes_new(self, snapshot: str, older: str = "") -> int:
        """Bytes on disk of the files that no other snapshot shares."""
        found = 0
        with faults(f"the size of snapshot {snapshot!r} cannot be read"):
            for folder, _, files in os.walk(self._snap(snapshot) / "layer"):
                for name in files:
                    about = os.lstat(os.path.join(folder, name))
                    if about.st_nlink == 1:
                        found += about.st_blocks * 512
        return found

    def send(self, snapshot: str, out: IO[bytes], parent: str | None = None) -> None:
        with faults(f"snapshot {snapshot!r} cannot be sent"):
            changes = self.changed(parent, snapshot) if parent is not None else None
            with self._view(self._snap(snapshot)) as tree:
                stream.send(tree, out, parent or "", changes)

    def receive(self, snapshot: str, source: IO[bytes], parent: str | None = None) -> None:
        """What is received is a whole tree, not one over an image."""
        there = self._at.snaps / checked(snapshot)
        if there.exists():
            raise PoolError(f"there is a snapshot {snapshot!r} in the pool already")
        with (
            faults(f"snapshot {snapshot!r} cannot be received"),
            draft(self._at, snapshot, _folder, remove) as made,
        ):
            (made / "layer").mkdir(mode=0o755)
            (made / "image").write_text("", encoding="utf-8")
            if parent is not None:
                with self._view(self._snap(parent)) as tree:
                    Copier().tree(str(tree), str(made / "layer"))
            stream.receive(made / "layer", source, parent or "")
            os.rename(made, there)

    def usage(self) -> tuple[int, int]:
        return shared.usage(self._at)

    def sync(self, snapshot: str) -> None:
        with faults(f"snapshot {snapshot!r} cannot be brought to the disk"):
            sync_file_system(self._snap(snapshot))

    def leftovers(self, boxes: set[str], snapshots: set[str]) -> list[str]:
        return shared.leftovers(self._at, boxes, snapshots)

    def collect(self, boxes: set[str], snapshots: set[str] | None) -> list[str]:
        return shared.collect(self._at, boxes, snapshots, self.drop_box, self.drop_snapshot, remove)

    def close(self, *, unmount: bool = False) -> None:
        if unmount and self._mounts:
            with faults(f"the pool {self._at.folder} cannot be unmounted"):
                shared.hide_all(self._at)


def _folder(path: Path) -> None:
    path.mkdir(mode=0o700)


def _image_of(tree: Path) -> str:
    return (tree / "image").read_text(encoding="utf-8")


def _versions(layer: Path) -> dict[str, tuple[int, int]]:
    found = {}
    start = len(str(layer))
    for folder, _, files in os.walk(layer):
        for name in files:
            path = os.path.join(folder, name)
            about = os.lstat(path)
            if stat.S_ISREG(about.st_mode) and about.st_nlink == 1:
                found[path[start:]] = version(about)
    return found
