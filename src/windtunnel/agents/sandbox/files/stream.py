"""A tree as a tar stream (pax), so that a snapshot can move to a pool of another kind or another machine.

Kept: kind, mode, owner, times to the nanosecond, extended attributes, hard links, device numbers, FIFOs,
and holes (GNU sparse format 1.0, which GNU tar and Python read). Sockets have no place in a tar and mean
nothing without their process; they are left out.

With a parent only what differs is sent; the first member then names what to remove from a copy of the parent.

Source: pax(1), GNU tar manual, "Storing Sparse Files".
"""

from __future__ import annotations

import io
import json
import os
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

from windtunnel.agents.sandbox.errors import PoolError
from windtunnel.agents.sandbox.files.archive import Unpacker, opened
from windtunnel.agents.sandbox.files.tree import extended, extents, remove, walk
from windtunnel.agents.sandbox.model import FileChange
from windtunnel.base.errors import UserError

_REMOVED = "WINDTUNNEL.removed"
_PARENT = "WINDTUNNEL.parent"
_USED = "WINDTUNNEL.used"
_KINDS = {
    stat.S_IFREG: tarfile.REGTYPE,
    stat.S_IFDIR: tarfile.DIRTYPE,
    stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFIFO: tarfile.FIFOTYPE,
    stat.S_IFCHR: tarfile.CHRTYPE,
    stat.S_IFBLK: tarfile.BLKTYPE,
}


def send(
    tree: Path,
    out: IO[bytes],
    parent: str = "",
    changes: Iterable[FileChange] | None = None,
    *,
    hollow: Callable[[str], bool] = lambda path: False,
    used: int = 0,
) -> None:
    """Write ``tree`` to ``out``: all of it, or with ``changes`` only these over ``parent``. Files at paths
    that ``hollow`` names keep their size alone. ``used``: what ``receive`` is to tell."""
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT, bufsize=1 << 20) as tar:
        sender = _Sender(tree, tar, hollow)
        if changes is None:
            sender.member("", {_USED: str(used)})
            for path in _paths(tree):
                sender.member(path, {})
            return
        listed = list(changes)
        gone = [each.path.lstrip("/") for each in listed if each.change == "deleted"]
        sent = {each.path.lstrip("/") for each in listed if each.change != "deleted"}
        sent |= _other_names(tree, sent)
        sender.member("", {_PARENT: parent, _REMOVED: json.dumps(gone), _USED: str(used)})
        for path in sorted(sent):
            sender.member(path, {})


def receive(target: Path, source: IO[bytes], parent: str = "") -> int:
    """Read a stream of ``send`` into ``target``: an empty folder, or a copy of the parent. Returns the bytes
    that the tree uses beyond its image, as the sender knew them."""
    try:
        with opened(source, "the stream of files") as tar:
            first = tar.next()
            if first is None:
                raise PoolError("the stream of files is empty")
            based = first.pax_headers.get(_PARENT, "")
            if bool(based) != bool(parent):
                needs = f"needs its parent {based!r}" if based else "holds a whole tree and takes no parent"
                raise PoolError(f"the stream of files {needs}")
            for path in sorted(json.loads(first.pax_headers.get(_REMOVED, "[]")), reverse=True):
                if ".." in path.split("/"):
                    raise PoolError(f"the stream of files names {path!r}, which lies outside")
                remove(target / path)
            Unpacker(target, "the stream of files").all(tar, first)
            used = first.pax_headers.get(_USED, "0")
            return int(used) if used.isdigit() else 0
    except UserError as error:
        raise PoolError(str(error)) from error


def _other_names(tree: Path, sent: set[str]) -> set[str]:
    """All names of the files in ``sent`` that have several: sent alone, one would become a file of its
    own."""
    wanted = set()
    for path in sent:
        about = os.lstat(tree / path)
        if about.st_nlink > 1 and not stat.S_ISDIR(about.st_mode):
            wanted.add(about.st_ino)
    if not wanted:
        return set()
    return {path for path in _paths(tree) if os.lstat(tree / path).st_ino in wanted}


def _paths(tree: Path) -> Iterator[str]:
    return (entry.path[len(str(tree)) + 1 :] for entry in walk(str(tree)))


class _Sender:
    def __init__(self, tree: Path, tar: tarfile.TarFile, hollow: Callable[[str], bool]) -> None:
        self._tree, self._tar, self._hollow = tree, tar, hollow
        self._links: dict[tuple[int, int], str] = {}

    def member(self, path: str, headers: dict[str, str]) -> None:
        full = str(self._tree / path)
        about = os.lstat(full)
        kind = stat.S_IFMT(about.st_mode)
        if kind not in _KINDS:
            return
        member = tarfile.TarInfo(path or ".")
        member.type = _KINDS[kind]
        member.mode = stat.S_IMODE(about.st_mode)
        member.uid, member.gid = about.st_uid, about.st_gid
        member.mtime = about.st_mtime_ns // 10**9
        headers["mtime"] = f"{member.mtime}.{about.st_mtime_ns % 10**9:09d}"
        member.pax_headers = headers
        key = (about.st_dev, about.st_ino)
        if kind != stat.S_IFDIR and about.st_nlink > 1:
            if key in self._links:
                member.type, member.linkname = tarfile.LNKTYPE, self._links[key]
                self._tar.addfile(member)
                return
            self._links[key] = path
        for name, value in extended(full).items():
            if not name.startswith("trusted.overlay."):
                headers[f"SCHILY.xattr.{name}"] = value.decode("utf-8", "surrogateescape")
        if kind == stat.S_IFLNK:
            member.linkname = os.readlink(full)
        elif kind in (stat.S_IFCHR, stat.S_IFBLK):
            member.devmajor, member.devminor = os.major(about.st_rdev), os.minor(about.st_rdev)
        if kind == stat.S_IFREG:
            self._file(member, headers, full, about.st_size)
        else:
            self._tar.addfile(member)

    def _file(self, member: tarfile.TarInfo, headers: dict[str, str], full: str, size: int) -> None:
        with open(full, "rb", buffering=0) as file:
            parts = [] if self._hollow(member.name) else list(extents(file.fileno(), size))
            if sum(end - start for start, end in parts) == size:
                member.size = size
                os.lseek(file.fileno(), 0, os.SEEK_SET)
                self._tar.addfile(member, io.BufferedReader(file, 1 << 20))
                return
            # the map in decimal lines, filled up to a block, then the parts that hold data; where none
            # does, one of no bytes at the end, as GNU tar has it: a reader that finds no part loses its place
            parts = parts or [(size, size)]
            lines = [len(parts), *(number for start, end in parts for number in (start, end - start))]
            table = "".join(f"{number}\n" for number in lines).encode()
            table += b"\0" * (-len(table) % tarfile.BLOCKSIZE)
            headers |= {
                "GNU.sparse.major": "1",
                "GNU.sparse.minor": "0",
                "GNU.sparse.name": member.name,
                "GNU.sparse.realsize": str(size),
            }
            member.size = len(table) + sum(end - start for start, end in parts)
            self._tar.addfile(member, _Parts(table, file, parts))


class _Parts(io.RawIOBase):
    """A file as the sparse format stores it: the map, then its parts, one after the other."""

    def __init__(self, table: bytes, file: io.FileIO, parts: list[tuple[int, int]]) -> None:
        self._chunks = self._read(table, file, parts)
        self._rest = b""

    def _read(self, table: bytes, file: io.FileIO, parts: list[tuple[int, int]]) -> Iterator[bytes]:
        yield table
        for start, end in parts:
            for place in range(start, end, 1 << 20):
                yield os.pread(file.fileno(), min(end - place, 1 << 20), place)

    def read(self, size: int = -1) -> bytes:
        found = bytearray()
        while len(found) < size:
            if not self._rest:
                self._rest = next(self._chunks, b"")
                if not self._rest:
                    break
            taken = size - len(found)
            found += self._rest[:taken]
            self._rest = self._rest[taken:]
        return bytes(found)
