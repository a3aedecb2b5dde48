"""What cannot be made is refused before anything is made, in one sentence with the field and the value."""

from __future__ import annotations

import errno
import os
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from windtunnel.agents.sandbox import checks
from windtunnel.agents.sandbox.model import SandboxLimits, SandboxSpec
from windtunnel.agents.sandbox.store.export import destination
from windtunnel.base.errors import UserError
from windtunnel.store.objects import files
from windtunnel.store.objects.files import ObjectError

SPEC = SandboxSpec("x")


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("name", "X", "name 'X' is not accepted"),
        ("image", " ", "image ' ' is not accepted; give 'host'"),
        ("network", "bridge", "network 'bridge' is not accepted; use off, proxy"),
        ("network", "proxy", "go together; given are 'proxy' and ''"),
        ("proxy_upstream", "https://api", "go together; given are 'off' and 'https://api'"),
        ("environment", {"A=B": "c"}, "environment key 'A=B' is not accepted; it has no '='"),
        ("environment", {"": "c"}, "environment key '' is not accepted"),
        ("environment", {"A\0": "c"}, r"environment key 'A\x00' is not accepted"),
        ("environment", {"A\nB": "c"}, r"environment key 'A\nB' is not accepted"),
        ("environment", {"A": "\0"}, r"environment A: '\x00' is not accepted; a value has no NUL"),
        ("environment", {"A": "b" * 2**17}, "environment A: '131075 bytes' is not accepted"),
        ("environment", {f"A{n}": "b" * 2**16 for n in range(17)}, "all up to 1 MiB"),
        ("hostname", "a\nb", r"host name 'a\nb' is not accepted; use up to 63 letters"),
        ("hostname", "a" * 64, "is not accepted; use up to 63 letters"),
        ("hostname", "-a", "host name '-a' is not accepted"),
        ("hostname", "a b", "host name 'a b' is not accepted"),
        ("workdir", "work", "workdir 'work' is not accepted; give an absolute path"),
        ("workdir", "/a\nb", r"workdir '/a\nb' is not accepted"),
        ("workdir", "/a/../b", "workdir '/a/../b' is not accepted"),
        ("workdir", "/" + "a" * 256, "... is not accepted; give an absolute path"),
        ("services", {"": "true"}, "service '' is not accepted"),
        ("services", {"a": " "}, "service a: ' ' is not accepted; give a command"),
        ("limits", SandboxLimits(memory=0), "limit memory 0 is not accepted; bytes of at least 16M"),
        ("limits", SandboxLimits(memory=-1), "limit memory -1 is not accepted"),
        ("limits", SandboxLimits(cpus=float("nan")), "limit cpus nan is not accepted; at least 0.01"),
        ("limits", SandboxLimits(cpus=0.0), "limit cpus 0.0 is not accepted"),
        ("limits", SandboxLimits(pids=2), "limit pids 2 is not accepted; at least 3"),
        ("limits", SandboxLimits(disk=1), "limit disk 1 is not accepted; bytes of at least 1M"),
    ],
)
def test_what_cannot_be_is_refused_by_its_field(field: str, value: Any, said: str) -> None:
    with pytest.raises(UserError) as refused:
        checks.checked_spec(replace(SPEC, **{field: value}))
    assert said in str(refused.value) and "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


def test_what_can_be_is_accepted() -> None:
    checks.checked_spec(SPEC)
    checks.checked_spec(
        SandboxSpec(
            "a.b-c_d",
            network="proxy",
            proxy_upstream="https://api.example:8443/v1",
            environment={"A": "b=c\nd", "a.b-c": "", "LONG": "x" * 100_000},
            hostname="Host-1.example",
            workdir="/",
            services={"web": "python3 -m http.server"},
            limits=SandboxLimits(16 * 2**20, 0.01, 3, 2**20),
        )
    )
    checks.checked_spec(replace(SPEC, limits=SandboxLimits(None, None, None, None)))


@pytest.mark.parametrize("label", ["a\nb", "a\0", "\x1b[31m", "a" * 201])
def test_a_label_is_one_short_line(label: str) -> None:
    with pytest.raises(UserError, match=r"label .* is not accepted; give one line"):
        checks.checked_label(label)
    checks.checked_label("")
    checks.checked_label("before ünïcode \u2014 upgrade")


def test_a_shell_is_a_program_inside_the_root(tmp_path: Path) -> None:
    def refused() -> bool:
        try:
            checks.need_shell(tmp_path, "image.tar")
        except UserError as error:
            assert str(error).startswith("image 'image.tar' has no shell: neither /bin/bash nor /bin/sh")
            return True
        return False

    (tmp_path / "usr/bin").mkdir(parents=True)
    assert refused()
    (tmp_path / "bin").symlink_to("usr/bin")
    (tmp_path / "bin/sh").symlink_to("/bin/sh")  # a ring inside, though this host has such a program
    assert refused()
    (tmp_path / "bin/sh").unlink()
    (tmp_path / "bin/sh").symlink_to("/usr/bin/busybox")
    (tmp_path / "usr/bin/busybox").write_bytes(b"")
    assert refused()
    (tmp_path / "usr/bin/busybox").chmod(0o755)
    assert not refused()
    (tmp_path / "bin/sh").unlink()
    (tmp_path / "bin/bash").mkdir()
    assert refused()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "'' is no place"),
        (" ", "' ' is no place"),
        ("{}/file", "file cannot be written (Not a directory)"),
        ("{}/file/below", "below cannot be written (Not a directory)"),
        ("/proc/nothing/here", "/proc/nothing/here cannot be written (No such file or directory)"),
        ("{}/" + "a" * 300, "cannot be written (File name too long)"),
        ("nosuch://x", "nosuch://x cannot be used: Protocol not known"),
    ],
)
def test_where_nothing_can_be_written_nothing_is_exported(tmp_path: Path, url: str, said: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError) as refused:
        destination(url.format(tmp_path))
    assert said in str(refused.value)
    assert os.listdir(tmp_path) == ["file"]


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UserError, match=r"^s3://b/x cannot be used: .* package s3fs, .*; pip install s3fs$"):
        destination("s3://b/x")


def test_a_full_disk_is_no_wrong_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.LocalFiles, "write", full)
    with pytest.raises(ObjectError, match="No space left"):
        destination(str(tmp_path / "place"))


def test_a_place_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    place = destination(str(tmp_path / "new/place"))
    assert place.names("checkpoints") == [] and os.listdir(tmp_path / "new/place") == []


@pytest.mark.root
def test_nothing_is_left_of_what_was_refused(host: Any, tmp_path: Path) -> None:
    source = tmp_path / "empty.tar"
    with tarfile.open(source, "w") as tar:
        tar.addfile(tarfile.TarInfo("etc/hosts"))
    before = host.context.pool.snapshots(), host.boxes(), os.listdir(host.home.boxes)
    for spec in (
        SandboxSpec("x", image=str(source)),
        SandboxSpec("x", hostname="a\nb"),
        SandboxSpec("x", environment={"A=B": "c"}),
    ):
        with pytest.raises(UserError):
            host.create(spec)
        assert (host.context.pool.snapshots(), host.boxes(), os.listdir(host.home.boxes)) == before
