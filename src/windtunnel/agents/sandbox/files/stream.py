"""A tree as a tar stream (pax), so that a snapshot can move to a pool of another kind or another machine.

GNU tar writes it: kind, mode, owner, times to the nanosecond, extended attributes, hard links, device
numbers, FIFOs, and holes (GNU sparse format 1.0). Sockets have no place in a tar and mean nothing without
their process; they are left out. The order of names and the headers depend on the tree alone (but for sparse
files, where tar puts its pid), so that what two snapshots have in common is the same bytes.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import IO

from windtunnel.agents.sandbox.errors import PoolError
from windtunnel.agents.sandbox.files.archive import Unpacker, opened
from windtunnel.agents.sandbox.files.tree import OWN
from windtunnel.base.errors import UserError

_USED = "WINDTUNNEL.used"
_PAX = (
    f"delete=atime,delete=ctime,exthdr.name=%d/PaxHeaders/%f,globexthdr.name=Pax,globexthdr.mtime=0,{_USED}="
)
_TAR = (
    "tar", "--create", "--format=pax", "--sparse", "--sparse-version=1.0", "--numeric-owner", "--sort=name",
    "--xattrs", "--xattrs-include=*", *(f"--xattrs-exclude={name}" for name in OWN),
    "--warning=no-file-ignored",
)  # fmt: skip


def send(tree: Path, out: IO[bytes], *, used: int = 0) -> None:
    """Write ``tree`` to ``out``. ``used``: what ``receive`` is to tell. Raises PoolError."""
    command = [*_TAR, f"--pax-option={_PAX}{used}", f"--directory={tree}", "."]
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


def receive(target: Path, source: IO[bytes]) -> int:
    """Read a stream of ``send`` into the empty folder ``target``. Returns the bytes that the tree uses beyond
    its image, as the sender knew them. Raises PoolError."""
    try:
        with opened(source, "the stream of files") as tar:
            Unpacker(target, "the stream of files").all(tar)
            used = tar.pax_headers.get(_USED, "0")
    except UserError as error:
        raise PoolError(str(error)) from error
    return int(used) if used.isdigit() else 0
