"""Roots of sandboxes where there is no btrfs: an overlay over the image, whose upper folder is copied.

A *layer* is what a sandbox has of its own. With overlayfs it holds only what differs from the image (with
white-outs and opaque folders, as the kernel keeps them); where overlays cannot be mounted it is a whole
tree. Features of overlays that make an upper folder mean more than it shows (renamed folders by reference,
metadata without data) are switched off: a layer can then be copied as it is.

A snapshot copies the layer, sharing blocks where the file system can, and takes files that did not change
since the sandbox's last snapshot from there by a hard link: a file in a snapshot is never written again.

Without root nothing is mounted: ``mount`` gives the folder itself, owners are the user's, and devices are
absent.

Source: Documentation/filesystems/overlayfs.rst.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from windtunnel.agents.sandbox.files import stream
from windtunnel.agents.sandbox.files.pool import FLAGS, Pool, checked, faults
from windtunnel.agents.sandbox.files.tree import Comparison, Copier, remove
from windtunnel.agents.sandbox.model import FileChange
from windtunnel.base import atomic
from windtunnel.linux import mounts, namespaces
from windtunnel.linux.system import sync_file_system


@dataclass(frozen=True)
class Known:
    """What a live layer had in common with its last snapshot: (inode, time of change) of every file.

    Every write to a file, its attributes or its names moves ``ctime``, which no process can set back; so a
    file whose inode and ``ctime`` are the ones noted holds what the snapshot holds. ``base``: the folder of
    the pool that holds the same files; ``files``: path -> (inode, ctime).
    """

    base: str
    files: dict[str, tuple[int, int]]

    def has(self, path: str, about: os.stat_result) -> bool:
        return about.st_nlink == 1 and self.files.get(path) == _version(about)

    def save(self, live: Path) -> None:
        text = json.dumps({"base": self.base, "files": self.files})
        atomic.replace(live / "known.json", text.encode(errors="surrogateescape"))


def known_of(live: Path) -> Known:
    """The note of a live root; an absent or broken one says nothing, which is always true."""
    try:
        found = json.loads((live / "known.json").read_text(encoding="utf-8", errors="surrogateescape"))
        return Known(found["base"], {path: (inode, time) for path, (inode, time) in found["files"].items()})
    except (OSError, ValueError, KeyError, TypeError):
        return Known("", {})


class CopyPool(Pool):
    """Live roots and snapshots are folders with ``layer``, and ``image``: the image's name where the layer
    lies over one."""

    kind = "copy"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._may_mount = os.geteuid() == 0
        with faults(f"the pool {folder} cannot be used"):
            self._overlay = self._may_mount and self._overlays_work()

    def _make(self, path: Path) -> None:
        path.mkdir(mode=0o700)

    def _publish(self, made: Path, name: Path) -> None:
        os.rename(made, name)

    def _remove(self, path: Path) -> None:
        remove(path)

    def create(self, box: str, image: str, limit: int | None = None) -> None:
        origin = self._image(image)
        if self._overlay:
            self._begin(box, None, image, "")
        else:
            self._begin(box, origin, "", f"images/{image}")

    def clone(self, box: str, snapshot: str, limit: int | None = None) -> None:
        origin = self._snap(snapshot)
        self._begin(box, origin / "layer", _image_of(origin), f"snaps/{snapshot}/layer")

    def _begin(self, box: str, layer: Path | None, image: str, base: str) -> None:
        """The live layer of ``box`` is a copy of ``layer`` (None: empty), in place of what it was."""
        live = self._lives / checked(box)
        with faults(f"sandbox {box!r} cannot get a root"), self._draft(box) as made:
            for name in ("layer", "work", "empty", "channel", "channel-work"):
                (made / name).mkdir(mode=0o755)
            (made / "image").write_text(image, encoding="utf-8")
            if layer is not None:
                Copier().tree(str(layer), str(made / "layer"))
            elif image:
                # a root that differs from its image in nothing has its mode and owner too
                shutil.copystat(self._images / image, made / "layer")
            Known(base, _versions(made / "layer") if base else {}).save(made)
            self.unmount(box)
            self._leave_channel(box)
            self._discard(live)
            os.rename(made, live)
            self._discard(self._channels / box)
            (self._channels / box).mkdir(mode=0o700)
            if self._overlay:
                # a mere folder would show its path on the host in the sandbox's table of mounts
                layers = [live / name for name in ("empty", "channel", "channel-work")]
                _mount_overlay("windtunnel-channel", self._channels / box, layers[:1], layers[1], layers[2])

    def mount(self, box: str) -> Path:
        live = self._live(box)
        if not self._may_mount:
            return live / "layer"
        image = _image_of(live)
        # an overlay does not show its upper folder: the name of what is mounted says whose it is
        label = f"windtunnel-{live.stat().st_ino}"
        with faults(f"the root of sandbox {box!r} cannot be mounted"):
            if not image:
                return self._show(
                    box,
                    lambda point: os.path.samefile(point, live / "layer"),
                    lambda point: mounts.bind(live / "layer", point, FLAGS),
                )
            return self._show(
                box,
                lambda point: any(each.source == label for each in mounts.at(point)),
                lambda point: _mount_overlay(
                    label, point, [self._images / image], live / "layer", live / "work"
                ),
            )

    def snapshot(self, box: str, snapshot: str) -> int:
        live, there = self._live(box), self._unused(snapshot)
        with faults(f"no snapshot of sandbox {box!r}"), self._draft(snapshot) as made:
            before, after = known_of(live), Known(f"snaps/{snapshot}/layer", {})
            layer, base = str(live / "layer"), str(self._folder / before.base)

            def reuse(path: str, about: os.stat_result) -> str | None:
                inside = path[len(layer) :]
                if about.st_nlink > 1:
                    return None
                after.files[inside] = _version(about)
                return base + inside if before.has(inside, about) else None

            (made / "layer").mkdir()
            (made / "image").write_text(_image_of(live), encoding="utf-8")
            copier = Copier(reuse=reuse)
            copier.tree(layer, str(made / "layer"))
            os.rename(made, there)
            # when this fails the older note still holds: every entry of it is checked against the file
            after.save(live)
        return copier.bytes

    def _compared(self, first: Path, second: Path) -> list[FileChange]:
        known = known_of(second) if second.parent == self._lives else Known("", {})
        before, after = str(first / "layer"), str(second / "layer")
        trusted = known.base == f"snaps/{first.name}/layer"

        def untouched(inside: str) -> bool:
            """Whether both layers have the same file at a path, told without reading it."""
            try:
                one, other = os.lstat(before + inside), os.lstat(after + inside)
            except OSError:
                return False
            if stat.S_ISDIR(one.st_mode) or stat.S_ISDIR(other.st_mode):
                return False
            same = (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)
            return same or (trusted and known.has(inside, other))

        with self._whole(first) as old, self._whole(second) as new:
            compared = Comparison(old, new, lambda path, one, other: untouched(path))
            if _image_of(first) and _image_of(first) == _image_of(second):
                for inside, deep in _touched(Path(before), Path(after), untouched):
                    compared.entry(inside, deep=deep)
            else:
                compared.trees()
            return compared.result()

    @contextmanager
    def _whole(self, tree: Path) -> Iterator[Path]:
        image = _image_of(tree)
        if not image:
            yield tree / "layer"
            return
        lower = [tree / "layer", self._images / image]
        with self._view(lambda point: _mount_overlay("windtunnel-view", point, lower)) as point:
            yield point

    def bytes_new(self, snapshot: str, older: str = "") -> int:
        """Bytes on disk of the files that no other snapshot shares."""
        with faults(f"the size of snapshot {snapshot!r} cannot be read"):
            files = (about for _, about in _files(self._snap(snapshot) / "layer"))
            return sum(about.st_blocks * 512 for about in files if about.st_nlink == 1)

    def receive(self, snapshot: str, source: IO[bytes], parent: str | None = None) -> None:
        """What is received is a whole tree, not one over an image."""
        there = self._unused(snapshot)
        with faults(f"snapshot {snapshot!r} cannot be received"), self._draft(snapshot) as made:
            (made / "layer").mkdir(mode=0o755)
            (made / "image").write_text("", encoding="utf-8")
            if parent is not None:
                with self._whole(self._snap(parent)) as tree:
                    Copier().tree(str(tree), str(made / "layer"))
            stream.receive(made / "layer", source, parent or "")
            os.rename(made, there)

    def sync(self, snapshot: str) -> None:
        with faults(f"snapshot {snapshot!r} cannot be brought to the disk"):
            sync_file_system(self._snap(snapshot))

    def _overlays_work(self) -> bool:
        """Whether an overlay with its upper folder in this pool can be mounted and written."""
        tried = self._trash / f"try-{os.getpid()}"
        remove(tried)
        lower, upper, work = (tried / name for name in ("lower", "upper", "work"))
        for folder in (lower, upper, work):
            folder.mkdir(parents=True)
        (lower / "file").touch()
        try:
            with self._view(lambda at: _mount_overlay("windtunnel-try", at, [lower], upper, work)) as point:
                (point / "file").unlink()
                return stat.S_ISCHR(os.lstat(upper / "file").st_mode)
        except OSError:
            return False
        finally:
            remove(tried)


def _image_of(tree: Path) -> str:
    return (tree / "image").read_text(encoding="utf-8")


def _version(about: os.stat_result) -> tuple[int, int]:
    return about.st_ino, about.st_ctime_ns


def _files(layer: Path) -> Iterator[tuple[str, os.stat_result]]:
    """All that is no folder, by its path inside; what cannot be read is passed over."""
    for folder, _, files in os.walk(layer):
        for name in files:
            path = os.path.join(folder, name)
            yield path[len(str(layer)) :], os.lstat(path)


def _versions(layer: Path) -> dict[str, tuple[int, int]]:
    return {
        path: _version(about)
        for path, about in _files(layer)
        if stat.S_ISREG(about.st_mode) and about.st_nlink == 1
    }


def _mount_overlay(
    label: str, point: Path, lower: list[Path], upper: Path | None = None, work: Path | None = None
) -> None:
    """``lower`` from the top down; without ``upper`` the mount is read-only."""
    pool = Path(os.path.commonpath([path for path in (*lower, upper, work) if path is not None]))

    def named(path: Path) -> str:
        return _escaped(path.relative_to(pool))

    options = ["redirect_dir=nofollow,metacopy=off,index=off", "lowerdir=" + ":".join(map(named, lower))]
    if upper is not None and work is not None:
        options += [f"upperdir={named(upper)}", f"workdir={named(work)}"]
    # the options can be read inside as they are given here: they name no path of the host
    namespaces.in_folder(pool, lambda: mounts.mount(label, point, "overlay", FLAGS, ",".join(options)))
    try:
        mounts.mount("none", point, flags=mounts.MS_PRIVATE)
    except OSError:
        mounts.unmount(point)
        raise


def _escaped(path: Path) -> str:
    text = str(path)
    for mark in ("\\", ":", ","):
        text = text.replace(mark, "\\" + mark)
    return text


def _touched(older: Path, newer: Path, untouched: Callable[[str], bool]) -> Iterator[tuple[str, bool]]:
    """Paths at which the trees of two layers over one image can differ, and whether all below may differ
    too."""
    pending = [""]
    while pending:
        below = pending.pop()
        for name in sorted({*_names(older, below), *_names(newer, below)}):
            inside = f"{below}/{name}"
            if untouched(inside):
                continue
            merged = all(_merges(f"{layer}{inside}") for layer in (older, newer))
            if merged:
                pending.append(inside)
            yield inside, not merged


def _names(layer: Path, below: str) -> list[str]:
    path = f"{layer}{below}"
    return os.listdir(path) if os.path.isdir(path) and not os.path.islink(path) else []


def _merges(path: str) -> bool:
    """Whether a layer leaves the image's entries below ``path`` as they are, but for those that it lists."""
    try:
        about = os.lstat(path)
    except OSError:
        # not in this layer: the image's own shows through, if nothing above hides it
        return True
    if not stat.S_ISDIR(about.st_mode):
        return False
    try:
        return os.getxattr(path, "trusted.overlay.opaque") not in (b"y", b"x")
    except OSError:
        return True
