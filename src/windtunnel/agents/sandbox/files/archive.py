"""Trees as tar streams: what a stranger may have made is read, and snapshots go to other pools and machines.

No member may be written outside of the target folder: names are taken relative to it, a name with ``..`` is
refused, and links among the parents of a member are followed as a process inside the sandbox would follow
them. A hard link may only name what is in the target already.

The compression is told by the first bytes.

A snapshot is written by GNU tar (pax): kind, mode, owner, times to the nanosecond, extended attributes, hard
links, device numbers, FIFOs, and holes (GNU sparse format 1.0). Sockets have no place in a tar and mean
nothing without their process; they are left out. The order of names and the headers depend on the tree alone
(but for sparse files, where tar puts its pid), so that what two snapshots have in common is the same bytes.
"""

from __future__ import annotations

import bz2
import contextlib
import errno
import gzip
import io
import lzma
import os
import shutil
import subprocess
import tarfile
import zlib
from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import IO, Any, cast

import zstandard

from windtunnel.agents.sandbox.errors import PoolError
from windtunnel.agents.sandbox.files.tree import OWN, make_folders, remove, set_extended, set_owner
from windtunnel.base.errors import UserError
from windtunnel.linux.system import held, opened

HOLLOW = "WINDTUNNEL.hollow"
"""Header of a file without data: its size."""
_BROKEN = (
    tarfile.TarError,
    EOFError,
    zlib.error,
    InvalidOperation,
    OverflowError,
    lzma.LZMAError,
    gzip.BadGzipFile,
    zstandard.ZstdError,
)
_READERS: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"\xfd7zXZ\0": lzma.open,
    b"BZh": bz2.open,
    b"\x28\xb5\x2f\xfd": lambda file: io.BufferedReader(
        zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True, closefd=False), 1 << 20
    ),
}
"""By the first bytes of compressed data."""
_NO_PLACE = {
    errno.ELOOP: "leads through a circle of links",
    errno.ENOTDIR: "lies below something that is no folder",
}
_XATTR = "SCHILY.xattr."
_TAR = (
    "tar", "--create", "--format=pax", "--sparse", "--sparse-version=1.0", "--numeric-owner", "--sort=name",
    "--xattrs", "--xattrs-include=*", *(f"--xattrs-exclude={name}" for name in OWN),
    "--pax-option=delete=atime,delete=ctime,exthdr.name=%d/PaxHeaders/%f", "--warning=no-file-ignored",
)  # fmt: skip


@contextlib.contextmanager
def open_archive(source: IO[bytes], what: str, *, to_end: bool = True) -> Iterator[tarfile.TarFile]:
    """The archive in ``source``, read as a stream; what is wrong with it becomes a UserError.

    ``to_end``: read what follows the last member too, where compressed data has its checksum."""
    try:
        with plain(source) as inner, tarfile.open(fileobj=inner, mode="r|") as tar:
            yield tar
            while to_end and inner.read(1 << 20):
                pass
    except _BROKEN as error:
        raise UserError(f"{what}: it is no whole tar archive ({error or type(error).__name__})") from error
    except OSError as error:
        # bz2 and gzip report damage as plain OSError without a number
        if error.errno is not None:
            raise
        raise UserError(f"{what}: it is no whole tar archive ({error})") from error


@contextlib.contextmanager
def plain(source: IO[bytes]) -> Iterator[IO[bytes]]:
    """``source`` less its compression."""
    buffered = io.BufferedReader(cast(io.RawIOBase, source), 1 << 20)
    start = buffered.peek(6)
    try:
        yield next(
            (reader(buffered) for mark, reader in _READERS.items() if start.startswith(mark)), buffered
        )
    finally:
        buffered.detach()


def unpack(path: Path, target: Path, what: str, *, layered: bool = False) -> None:
    """All of the tarball ``path`` into the folder ``target``; ``what`` it is, for what is wrong with it."""
    with open(path, "rb", buffering=0) as file, open_archive(cast(IO[bytes], file), what) as tar:
        Unpacker(target, what, layered=layered).all(tar)


class Unpacker:
    """Writes members below ``target``. With ``layered`` the marks of OCI layers delete what was there
    before."""

    def __init__(self, target: Path, what: str, *, layered: bool = False) -> None:
        self._target, self._what, self._layered = target.resolve(), what, layered
        self._fresh: set[str] = set()
        self._folders: dict[str, tarfile.TarInfo] = {}

    def all(self, tar: tarfile.TarFile) -> None:
        """Every member of ``tar`` that is left in the stream."""
        # what a member may be is decided here
        tar.extraction_filter = lambda member, path: member
        tar.errorlevel = 2
        with opened(self._target) as self._root:
            while (member := tar.next()) is not None:
                self._place(tar, member)
                # a stream is read once: what tarfile remembers of it would only grow
                tar.members.clear()  # type: ignore[attr-defined]
        # last, because writing into a folder moves its time
        for name, member in sorted(self._folders.items(), reverse=True):
            path = self._target / name
            if path.is_dir() and not path.is_symlink():
                self._attributes(str(path), member)

    def _place(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        name = self._name(member.name)
        if name == "":
            if member.isdir():
                self._folders[""] = member
            return
        path = self._placed(name)
        if self._layered and path.name.startswith(".wh."):
            self._white_out(path)
            return
        if not (member.isdir() and path.is_dir() and not path.is_symlink()):
            remove(path)  # a later member takes the place of an earlier one; folders are merged
        if member.isdir():
            path.mkdir(exist_ok=True)
            self._folders[name] = member
        elif member.islnk():
            origin = self._placed(self._name(member.linkname))
            if not os.path.lexists(origin) or origin.is_dir():
                raise UserError(
                    f"{self._what}: {member.name!r} is a link to {member.linkname!r}, which is not in it"
                )
            os.link(origin, path, follow_symlinks=False)
        elif member.type not in tarfile.SUPPORTED_TYPES:
            raise UserError(
                f"{self._what}: {member.name!r} is of a kind that is not supported ({member.type!r})"
            )
        else:
            try:
                tar.extract(member.replace(name=path.name), path.parent, set_attrs=False)
            except PermissionError:
                if os.geteuid() == 0 or not (member.ischr() or member.isblk()):
                    raise
                return  # devices need root; a sandbox has its own /dev
            if HOLLOW in member.pax_headers:
                os.truncate(path, int(member.pax_headers[HOLLOW]))
        self._fresh.add(name)
        if not member.isdir() and not member.islnk():
            self._attributes(str(path), member)

    def _name(self, name: str) -> str:
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if ".." in parts or "\0" in name:
            raise UserError(f"{self._what}: {name!r} points outside of the archive")
        return "/".join(parts)

    def _placed(self, name: str) -> Path:
        """Where ``name`` goes: links among its parents are followed as if ``target`` were ``/``.

        Layers of real images do write through links of lower layers (``lib`` into ``usr/lib``).
        """
        above, last = os.path.split(f"/{name}")
        try:
            with held(make_folders(self._root, above)) as folder:
                return Path(os.readlink(f"/proc/self/fd/{folder}"), last)
        except OSError as error:
            if error.errno not in _NO_PLACE:
                raise
            raise UserError(f"{self._what}: {name!r} {_NO_PLACE[error.errno]}") from None

    def _white_out(self, path: Path) -> None:
        """``.wh.name`` hides name; ``.wh..wh..opq`` hides all that lower layers put into the folder."""
        if path.name != ".wh..wh..opq":
            gone = path.name.removeprefix(".wh.")
            if gone in ("", ".", ".."):
                raise UserError(f"{self._what}: {path.name!r} is no mark that a layer may hold")
            remove(path.with_name(gone))
            return
        prefix = os.path.relpath(path.parent, self._target)
        self._hide(path.parent, "" if prefix == "." else f"{prefix}/")

    def _hide(self, folder: Path, prefix: str) -> None:
        for entry in list(os.scandir(folder)):
            inner = f"{prefix}{entry.name}"
            if inner in self._fresh and entry.is_dir(follow_symlinks=False):
                self._hide(Path(entry.path), f"{inner}/")
            elif not any(name == inner or name.startswith(f"{inner}/") for name in self._fresh):
                remove(Path(entry.path))

    def _attributes(self, path: str, member: tarfile.TarInfo) -> None:
        set_owner(path, member.uid, member.gid)
        for key, value in member.pax_headers.items():
            if key.startswith(_XATTR) and (name := key.removeprefix(_XATTR)) not in OWN:
                set_extended(path, name, value.encode("utf-8", "surrogateescape"))
        if not member.issym():
            os.chmod(path, member.mode & 0o7777)
        # the header's text holds nanoseconds, which a float of it cannot
        when = int(Decimal(member.pax_headers.get("mtime", str(member.mtime))) * 10**9)
        os.utime(path, ns=(when, when), follow_symlinks=False)


def transport(path: Path) -> str:
    """What skopeo calls an image that lies in a folder or a tarball like this; empty where there is none."""
    if path.is_dir():
        return "oci" if (path / "oci-layout").is_file() and (path / "index.json").is_file() else ""
    parts = ("blobs", "index.json", "manifest.json", "repositories")
    with (
        open(path, "rb", buffering=0) as file,
        contextlib.suppress(UserError),
        open_archive(cast(IO[bytes], file), str(path), to_end=False) as tar,
    ):
        for member in tar:
            name = member.name.removeprefix("./").strip("/")
            if name == "oci-layout":
                return "oci-archive"
            if name not in ("", ".") and name.split("/")[0] not in parts:
                break
    return ""


def send(tree: Path, out: IO[bytes], *more: str) -> None:
    """Write ``tree`` to ``out``; ``more``: options of tar. Raises PoolError."""
    command = [*_TAR, *more, f"--directory={tree}", "."]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as tar:
        assert tar.stdout is not None and tar.stderr is not None
        try:
            shutil.copyfileobj(tar.stdout, out, 1 << 20)
        except BaseException:
            tar.kill()
            raise
        words = tar.stderr.read().decode(errors="replace")
    if tar.returncode:
        raise PoolError(f"tar cannot read {tree}: {' '.join(words.split())[-300:]}")


def receive(target: Path, source: IO[bytes]) -> None:
    """Read a stream of ``send`` into the empty folder ``target``. Raises PoolError."""
    try:
        with open_archive(source, "the stream of files") as tar:
            Unpacker(target, "the stream of files").all(tar)
    except UserError as error:
        raise PoolError(str(error)) from error
