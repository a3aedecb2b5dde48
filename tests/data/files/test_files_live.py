"""Real hosts: what clients write is read, is on all hosts, and outlives the one that took it."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from windtunnel.data.files.check import check
from windtunnel.data.files.live import host as live
from windtunnel.data.files.live import lines
from windtunnel.data.files.live.lines import LinesFileSystem
from windtunnel.data.files.model import FilesError, OperationKind, Status


def test_hosts_have_what_is_written_when_the_primary_is_lost_and_comes_again(start: Any) -> None:
    hosts, files = start(3)
    files.perform(OperationKind.MKDIR, "/d")
    files.perform(OperationKind.CREATE, "/d/f")
    content = bytes(range(256)) * 80_000  # five times the ring
    assert files.write("/d/f", -1, content) == 0
    files.sync()
    assert files.read("/d/f", 0, len(content) + 9) == content
    with pytest.raises(OSError) as error:
        files.perform(OperationKind.RMDIR, "/d")
    assert error.value.errno == errno.ENOTEMPTY
    (primary,) = (row for row in files.status() if isinstance(row, Status) and row.leads)
    lost = next(host for host in hosts if host.spec.name == primary.name)
    lost.kill()
    files.write("/d/f", 7, b"after")  # to the next primary
    files.perform(OperationKind.RENAME, "/d/f", target="/g")
    files.sync()
    content = content[:7] + b"after" + content[12:]
    assert files.read("/g", 0, len(content)) == content and files.names("/d") == ()
    lost.revive()
    live.complete(files, 3, 120.0)
    files.perform(OperationKind.CREATE, "/h")
    files.sync()
    for host in hosts:
        host.stop()
    contents = [check(Path(host.spec.folder)) for host in hosts]
    assert contents[0].digests == contents[1].digests == contents[2].digests
    assert set(contents[0].digests) == {"/", "/d", "/g", "/h"} and not any(
        content.damage for content in contents
    )


def test_fewer_hosts_than_an_fsync_needs(start: Any) -> None:
    hosts, files = start(2)
    files.perform(OperationKind.CREATE, "/a")
    files.sync()
    follower = next(row for row in files.status() if isinstance(row, Status) and not row.leads)
    next(host for host in hosts if host.spec.name == follower.name).kill()
    files.write("/a", 0, b"x")
    with pytest.raises(FilesError, match="1 of 2 hosts hold the files; an fsync needs 2"):
        files.sync()


def test_fsspec_writes_whole_files(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, files = start(1, least=1)
    monkeypatch.setattr(lines, "connect", lambda name, **options: files)
    monkeypatch.setattr(LinesFileSystem, "clients", {})
    system = LinesFileSystem(skip_instance_cache=True)
    system.makedirs("lines://x/a", exist_ok=True)
    with system.open("lines://x/a/b", "wb") as file:
        file.write(b"1" * 9_000_000)
        assert not system.exists("lines://x/a/b") and system.ls("lines://x/a") == []
    assert system.cat("lines://x/a/b") == b"1" * 9_000_000
    with system.open("lines://x/a/b", "ab") as file:
        file.write(b"2")
    assert system.tail("lines://x/a/b", 2) == b"12"
    system.pipe_file("x/a/c", b"first", mode="create")
    with pytest.raises(FileExistsError):
        system.pipe_file("x/a/c", b"second", mode="create")
    system.pipe_file("x/a/c", b"third")
    assert system.cat("x/a/c") == b"third"
    system.mv("x/a/c", "x/d")
    assert sorted(system.find("x")) == ["x/a/b", "x/d"]
    system.rm("x/a", recursive=True)
    assert system.find("x") == ["x/d"]
