"""Where a root comes from: this machine's packages, a directory, a tarball or an OCI image layout.

A source is looked at before anything is written: it yields the name under which the pool keeps the image
(with a digest of what is in it, so that the same thing is imported once) and a function that fills an empty
folder.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from windtunnel.agents.sandbox.live.files import archive, host_image, oci
from windtunnel.agents.sandbox.live.files.tree import Copier
from windtunnel.base.errors import UserError

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Source:
    """``fill`` makes the root in an empty folder; what it raises leaves that folder to its caller."""

    name: str
    fill: Callable[[Path, Progress], None]


def look_at(source: str) -> Source:
    """What ``source`` is, or UserError in one sentence."""
    if source == "host":
        packages = host_image.chosen_packages()
        return Source(
            f"host-{host_image.digest(packages)}",
            lambda target, progress: host_image.fill(target, packages, progress),
        )
    path = Path(source).expanduser()
    if not path.exists():
        raise UserError(
            f"image {source!r}: there is no such image, file or folder; accepted are 'host', the name of an "
            "imported image, a folder, a tarball, or an OCI image layout (folder or tarball)"
        )
    path = path.resolve()
    if not os.access(path, os.R_OK):
        raise UserError(f"image {source!r}: it cannot be read")
    if path.is_dir():
        if oci.is_layout(path):
            return _of_layout(path)
        return Source(
            _name(path, _digest_of_folder(path)), lambda target, progress: _copy(path, target, progress)
        )
    if not path.is_file():
        raise UserError(f"image {source!r}: it is neither a folder nor a file")
    if archive.is_layout(path):
        return _of_layout(path)
    return Source(
        _name(path, archive.digest(path)), lambda target, progress: archive.unpack(path, target, progress)
    )


def _of_layout(path: Path) -> Source:
    image = oci.read(path)
    return Source(_name(path, image.digest), lambda target, progress: oci.fill(image, target, progress))


def _name(path: Path, digest: str) -> str:
    base = re.sub(r"(\.(tar|tgz|tzst|txz|gz|xz|zst|oci))+$", "", path.name.lower())
    base = re.sub(r"[^a-z0-9._-]+", "-", base).strip("-._")[:40] or "image"
    return f"{base}-{digest[:12]}"


def _copy(path: Path, target: Path, progress: Progress) -> None:
    progress(f"copying {path}")
    Copier().tree(str(path), str(target), leave_out=lambda inner: target == Path(inner))


def _digest_of_folder(path: Path) -> str:
    """Of names, kinds, modes, owners, sizes and times: bytes are not read, as copying tools do not either."""
    found = hashlib.blake2s(digest_size=6)
    pending = [str(path)]
    while pending:
        folder = pending.pop()
        try:
            with os.scandir(folder) as entries:
                inner = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            raise UserError(f"image {str(path)!r}: {folder} cannot be read ({error.strerror})") from error
        for entry in inner:
            about = entry.stat(follow_symlinks=False)
            ends = os.readlink(entry.path) if entry.is_symlink() else ""
            line = (
                entry.path,
                about.st_mode,
                about.st_uid,
                about.st_gid,
                about.st_size,
                about.st_mtime_ns,
                ends,
            )
            found.update(repr(line).encode())
            if entry.is_dir(follow_symlinks=False):
                pending.append(entry.path)
    return found.hexdigest()
