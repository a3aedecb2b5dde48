"""Where a root comes from: this machine's packages, a directory, a tarball, an OCI layout or a registry.

A source is looked at before anything is written: it yields the name under which the pool keeps the image
(with a digest of what is known of it without reading it, so that the same thing is imported once) and a
function that fills an empty folder.

An OCI image layout, a folder or a tarball of it, is what ``skopeo``, ``buildah`` and ``docker save`` make. Of
an index, the manifest for Linux on this machine's architecture is taken. Every blob is checked against the
digest that names it before a byte of it is used. Layers are applied in order with their white-outs (OCI image
specification 1.1: image-layout.md, image-index.md, manifest.md, layer.md). An image of a registry
(``docker://NAME``) comes by skopeo, as such a layout.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from windtunnel.agents.sandbox.files import archive, host_image
from windtunnel.agents.sandbox.files.tree import Copier, walk
from windtunnel.base.errors import UserError

_DIGEST = re.compile(r"(sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128})")
_ARCHITECTURES = {
    "x86_64": "amd64",
    "aarch64": "arm64",
    "armv7l": "arm",
    "ppc64le": "ppc64le",
    "s390x": "s390x",
}
REGISTRY = "docker://"
PATIENCE = 1800.0
"""Seconds that an image may take to come."""
_LOOPBACK = re.compile(r"(localhost|127\.[0-9.]+|\[::1\])(:[0-9]+)?/")
_SMALL = 8 << 20
"""More bytes than any index, manifest or configuration has."""
Progress = Callable[[str], None]
Keep = Callable[[int], None]


def is_layout(path: Path) -> bool:
    """Whether a folder or a tarball is an OCI image layout."""
    if path.is_dir():
        return (path / "oci-layout").is_file() and (path / "index.json").is_file()
    return archive.is_layout(path)


def layers_of(path: Path) -> tuple[str, ...]:
    """Digests of the layers of the layout at ``path`` (folder or tarball) for this machine, or UserError."""
    with _folder(path) as folder:
        return _layers(path, folder)


def _layers(path: Path, folder: Path) -> tuple[str, ...]:
    digest = _chosen(path, folder)
    layers = _json(path, _blob(path, folder, digest).read_bytes(), digest).get("layers")
    if not isinstance(layers, list) or not layers:
        raise UserError(f"image {str(path)!r}: its manifest names no layers")
    return tuple(_digest(path, layer) for layer in layers)


def fill_layers(path: Path, target: Path, progress: Progress, there: int, keep: Keep) -> None:
    """Apply the layers of the layout at ``path`` to ``target``, in which so many lie already; ``keep`` is
    called after each."""
    with _folder(path) as folder:
        layers = _layers(path, folder)
        for count, layer in enumerate(layers[there:], there + 1):
            progress(f"layer {count} of {len(layers)}")
            archive.unpack(
                _blob(path, folder, layer), target, f"image {str(path)!r}, layer {count}", layered=True
            )
            keep(count)


@contextmanager
def _folder(path: Path) -> Iterator[Path]:
    """The layout as a folder; a tarball is unpacked within the block."""
    if path.is_dir():
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="windtunnel-oci-", dir="/var/tmp") as folder:
        archive.unpack(path, Path(folder), f"image {str(path)!r}")
        yield Path(folder)


def _chosen(path: Path, folder: Path) -> str:
    """Digest of the manifest for Linux on this architecture; an index may name another index."""
    wanted = _ARCHITECTURES.get(platform.machine(), platform.machine())
    index = _json(path, (folder / "index.json").read_bytes(), "index.json")
    offered: list[str] = []
    for _ in range(4):
        nested = ""
        for entry in index.get("manifests") or []:
            if not isinstance(entry, dict):
                raise UserError(f"image {str(path)!r}: an index of it is not as the OCI specification says")
            if "image.index" in str(entry.get("mediaType")) or "manifest.list" in str(entry.get("mediaType")):
                nested = nested or _digest(path, entry)
                continue
            place = entry.get("platform") or _platform(path, folder, _digest(path, entry))
            if (place.get("os"), place.get("architecture")) == ("linux", wanted):
                return _digest(path, entry)
            offered.append(f"{place.get('os')}/{place.get('architecture')}")
        if not nested:
            break
        index = _json(path, _blob(path, folder, nested).read_bytes(), nested)
    raise UserError(
        f"image {str(path)!r}: it has nothing for linux/{wanted}; "
        f"it offers {', '.join(offered) or 'no manifests'}"
    )


def _platform(path: Path, folder: Path, manifest: str) -> dict[str, Any]:
    """Layouts of one image often leave the platform to the image's own configuration."""
    found = _json(path, _blob(path, folder, manifest).read_bytes(), manifest)
    config = _digest(path, found.get("config"))
    return _json(path, _blob(path, folder, config).read_bytes(), config)


def _digest(path: Path, entry: object) -> str:
    found = entry.get("digest") if isinstance(entry, dict) else None
    if not isinstance(found, str) or not _DIGEST.fullmatch(found):
        raise UserError(f"image {str(path)!r}: {found!r} is no digest; accepted are sha256 and sha512")
    return found


def _blob(path: Path, folder: Path, digest: str) -> Path:
    """The file of a blob whose bytes are what its name says."""
    algorithm, value = digest.split(":")
    blob = folder / "blobs" / algorithm / value
    if not blob.is_file():
        raise UserError(f"image {str(path)!r}: blob {digest[:19]}... is missing")
    with open(blob, "rb") as file:
        if hashlib.file_digest(file, algorithm).hexdigest() != value:
            raise UserError(f"image {str(path)!r}: blob {digest[:19]}... is damaged, its digest differs")
    return blob


def _json(path: Path, raw: bytes, name: str) -> dict[str, Any]:
    try:
        found = json.loads(raw) if len(raw) < _SMALL else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UserError(f"image {str(path)!r}: {name[:19]} is not as the OCI specification says")
    return found


@dataclass(frozen=True)
class Source:
    """``fill(target, progress, there, keep)`` makes the root in an empty folder; what it raises leaves that
    folder to its caller. ``layers``: the digests of what it is made of; where there are some, the folder may
    hold the first of them already (how many: ``there``); ``keep`` is called with their number after each."""

    name: str
    fill: Callable[[Path, Progress, int, Keep], None]
    layers: Callable[[], tuple[str, ...]] = tuple

    def chain(self) -> list[str]:
        """A name for what the first layer makes, the first two, and so on."""
        layers = self.layers()
        whole = ["".join(layers[: count + 1]).encode() for count in range(len(layers))]
        return [hashlib.sha256(each).hexdigest()[:32] for each in whole]


def _path(source: str) -> Path:
    try:
        path = Path(source).expanduser().resolve()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        words = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"image {source[:80]!r}: it cannot be looked for ({words})") from error
    return path


def look_at(source: str) -> Source:
    """What ``source`` is, or UserError in one sentence."""
    if source == "host" or source.startswith("host+"):
        extra, folders = host_image.more(source)
        packages = host_image.chosen_packages(extra=extra)
        parts = [host_image.digest(packages), *map(_digest_of_path, folders)]
        digest = hashlib.blake2s(repr((parts, folders)).encode(), digest_size=6).hexdigest()
        return Source(
            f"host-{digest if folders else parts[0]}",
            lambda target, progress, *_: host_image.fill(target, packages, progress, folders=folders),
        )
    if source.startswith(REGISTRY):
        return _of_registry(source)
    path = _path(source)
    if not path.exists():
        raise UserError(
            f"image {source!r}: there is no such image, file or folder; accepted are 'host', "
            "'host+PACKAGE,/FOLDER', the name of an imported image, a folder, a tarball, an OCI image layout "
            "(folder or tarball), or 'docker://NAME'"
        )
    if not os.access(path, os.R_OK):
        raise UserError(f"image {source!r}: it cannot be read")
    if not path.is_dir() and not path.is_file():
        raise UserError(f"image {source!r}: it is neither a folder nor a file")
    name = _name(path, _digest_of_path(path))
    if is_layout(path):
        return Source(name, partial(fill_layers, path), partial(layers_of, path))
    return Source(name, partial(_copy if path.is_dir() else _unpack, path))


def _of_registry(source: str) -> Source:
    """An image of a registry; raises UserError where there is none of that name, or no skopeo."""
    if shutil.which("skopeo") is None:
        raise UserError(f"image {source!r}: that needs skopeo; 'apt-get install skopeo' installs it")
    said = json.loads(_skopeo(source, "inspect", source))
    digest, layers = said["Digest"], tuple(said["Layers"])

    def layered(target: Path, progress: Progress, there: int, keep: Keep) -> None:
        with tempfile.TemporaryDirectory(prefix="windtunnel-oci-", dir="/var/tmp") as folder:
            progress(f"fetching {source}")
            _skopeo(source, "copy", "--quiet", source, f"oci:{folder}:image")
            if layers_of(Path(folder)) != layers:
                raise UserError(f"image {source!r}: it was changed while it was fetched; import it again")
            fill_layers(Path(folder), target, progress, there, keep)

    name = _name(Path(source.partition("@")[0]), digest.split(":")[1])
    return Source(name, layered, lambda: layers)


def _skopeo(source: str, verb: str, *arguments: str) -> bytes:
    plain = _LOOPBACK.match(source.removeprefix(REGISTRY)) is not None
    verify = ["--tls-verify=false" if verb == "inspect" else "--src-tls-verify=false"] if plain else []
    policy = [] if os.path.exists("/etc/containers/policy.json") else ["--insecure-policy"]
    done = subprocess.run(
        ["skopeo", *policy, "--override-os", "linux", verb, *verify, *arguments],
        capture_output=True, check=False, timeout=PATIENCE,
    )  # fmt: skip
    if done.returncode:
        words = " ".join(done.stderr.decode(errors="replace").split())[-300:]
        raise UserError(f"image {source!r}: skopeo cannot have it ({words})")
    return done.stdout


def _name(path: Path, digest: str) -> str:
    base = re.sub(r"(\.(tar|tgz|tzst|txz|gz|xz|zst|oci))+$", "", path.name.lower())
    base = re.sub(r"[^a-z0-9._-]+", "-", base).strip("-._")[:40] or "image"
    return f"{base}-{digest[:12]}"


def _copy(path: Path, target: Path, progress: Progress, *_: object) -> None:
    progress(f"copying {path}")
    Copier().tree(str(path), str(target), leave_out=lambda inner: target == Path(inner))


def _unpack(path: Path, target: Path, progress: Progress, *_: object) -> None:
    progress(f"unpacking {path}")
    archive.unpack(path, target, f"image {str(path)!r}")


def _digest_of_path(path: Path) -> str:
    """Of what the file system says of a file or a folder: a time of change cannot be set back."""
    if path.is_dir():
        return _digest_of_folder(path)
    of = path.stat()
    stamp = (of.st_mode, of.st_uid, of.st_gid, of.st_ino, of.st_size, of.st_mtime_ns, of.st_ctime_ns)
    return hashlib.blake2s(repr((str(path), stamp)).encode(), digest_size=6).hexdigest()


def _digest_of_folder(path: Path) -> str:
    """Of names, kinds, modes, owners, sizes and times: bytes are not read, as copying tools do not either."""
    found = hashlib.blake2s(digest_size=6)
    try:
        for entry in walk(str(path)):
            about = entry.stat(follow_symlinks=False)
            ends = os.readlink(entry.path) if entry.is_symlink() else ""
            told = (about.st_mode, about.st_uid, about.st_gid, about.st_size, about.st_mtime_ns, ends)
            found.update(repr((entry.path, *told)).encode())
    except OSError as error:
        raise UserError(f"image {str(path)!r}: {error.filename} cannot be read ({error.strerror})") from error
    return found.hexdigest()
