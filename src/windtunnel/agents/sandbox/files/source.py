"""Where a root comes from: this machine's packages, a directory, a tarball, an OCI layout or a registry.

A source is looked at before anything is written: it yields the name under which the pool keeps the image
(with a digest of what is known of it without reading it, so that the same thing is imported once) and a
function that fills an empty folder.

An OCI image (a layout as a folder or a tarball, what ``docker save`` writes, ``docker://NAME`` of a registry)
comes by skopeo, which takes what is for Linux on this machine's architecture and checks every blob. Its
layers are applied in order with their white-outs (OCI image specification 1.1: layer.md).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from windtunnel.agents.sandbox.files import archive, host_image
from windtunnel.agents.sandbox.files.tree import Copier, walk
from windtunnel.base.errors import UserError

REGISTRY = "docker://"
PATIENCE = 1800.0
"""Seconds that an image may take to come."""
_LOOPBACK = re.compile(r"(localhost|127\.[0-9.]+|\[::1\])(:[0-9]+)?/")
Keep = Callable[[int], None]


@dataclass(frozen=True)
class Source:
    """``fill(target, there, keep)`` makes the root in an empty folder, and says what is left out; what it
    raises leaves that folder to its caller. ``layers``: the digests of what it is made of; where there are
    some, the folder may hold the first of them already (how many: ``there``); ``keep`` is called with their
    number after each."""

    name: str
    fill: Callable[[Path, int, Keep], list[str]]
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
            lambda target, *_: host_image.fill(target, packages, folders=folders),
        )
    if source.startswith(REGISTRY):
        digest = json.loads(_skopeo(source, "inspect", source))["Digest"]
        return _of_layers(source, source, _name(Path(source.partition("@")[0]), digest.split(":")[1]))
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
    if transport := archive.transport(path):
        return _of_layers(source, f"{transport}:{path}", name)
    return Source(name, partial(_copy if path.is_dir() else _unpack, path))


def _of_layers(source: str, reference: str, name: str) -> Source:
    """The image that skopeo calls ``reference``."""
    layers = lambda: tuple(json.loads(_skopeo(source, "inspect", reference))["Layers"])  # noqa: E731

    def fill(target: Path, there: int, keep: Keep) -> list[str]:
        with tempfile.TemporaryDirectory(prefix="windtunnel-oci-", dir="/var/tmp") as folder:
            _skopeo(source, "copy", "--quiet", reference, f"oci:{folder}:image")
            for count, layer in enumerate(_manifest(Path(folder))[there:], there + 1):
                what = f"image {source!r}, layer {count}"
                archive.unpack(_blob(Path(folder), layer), target, what, layered=True)
                keep(count)
        return []

    return Source(name, fill, layers)


def _manifest(folder: Path) -> list[str]:
    """Digests of the layers of the one image in a layout that skopeo wrote."""
    (image,) = json.loads((folder / "index.json").read_bytes())["manifests"]
    manifest = json.loads(_blob(folder, image["digest"]).read_bytes())
    return [layer["digest"] for layer in manifest["layers"]]


def _blob(folder: Path, digest: str) -> Path:
    return folder / "blobs" / digest.replace(":", "/")


def _skopeo(source: str, verb: str, *arguments: str) -> bytes:
    if shutil.which("skopeo") is None:
        raise UserError(f"image {source!r}: that needs skopeo; 'apt-get install skopeo' installs it")
    plain = _LOOPBACK.match(source.removeprefix(REGISTRY)) is not None
    verify = ["--tls-verify=false" if verb == "inspect" else "--src-tls-verify=false"] if plain else []
    policy = [] if os.path.exists("/etc/containers/policy.json") else ["--insecure-policy"]
    done = subprocess.run(
        ["skopeo", *policy, "--override-os=linux", verb, *verify, *arguments],
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


def _copy(path: Path, target: Path, *_: object) -> list[str]:
    Copier().tree(str(path), str(target), leave_out=lambda inner: target == Path(inner))
    return []


def _unpack(path: Path, target: Path, *_: object) -> list[str]:
    archive.unpack(path, target, f"image {str(path)!r}")
    return []


def _digest_of_path(path: Path) -> str:
    """Of what the file system says of a file or a folder: a time of change cannot be set back."""
    if path.is_dir():
        return _digest_of_folder(path)
    of = path.stat()
    stamp = (of.st_mode, of.st_uid, of.st_gid, of.st_ino, of.st_size, of.st_mtime_ns, of.st_ctime_ns)
    return hashlib.blake2s(repr((str(path), stamp)).encode(), digest_size=6).hexdigest()


def _digest_of_folder(path: Path) -> str:
    """Of names, kinds, modes, owners, sizes and times: bytes are not read, as copying tools do not either."""
    hasher = hashlib.blake2s(digest_size=6)
    try:
        for entry in walk(str(path)):
            about = entry.stat(follow_symlinks=False)
            ends = os.readlink(entry.path) if entry.is_symlink() else ""
            facts = (about.st_mode, about.st_uid, about.st_gid, about.st_size, about.st_mtime_ns, ends)
            hasher.update(repr((entry.path, *facts)).encode())
    except OSError as error:
        raise UserError(f"image {str(path)!r}: {error.filename} cannot be read ({error.strerror})") from error
    return hasher.hexdigest()
