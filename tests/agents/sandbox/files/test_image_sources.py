"""Tarballs, OCI layouts and this machine's packages: what comes in, and what is refused."""

from __future__ import annotations

import gzip
import lzma
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agents.sandbox.files.pool_support import Opener, filled, need_root, state, tarball
from support import small_image
from windtunnel.agents.sandbox.errors import PoolError
from windtunnel.agents.sandbox.files import archive, host_image
from windtunnel.agents.sandbox.files.source import look_at
from windtunnel.base.errors import UserError


def zstd(raw: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor().compress(raw)


@pytest.mark.parametrize(
    ("ending", "squeeze"),
    [(".tar", bytes), (".tar.gz", gzip.compress), (".tar.xz", lzma.compress), (".tar.zst", zstd)],
)
def test_a_tarball_of_any_compression(tmp_path: Path, ending: str, squeeze: Callable[[bytes], bytes]) -> None:
    raw = tarball(
        ("folder", "./etc", ""), ("file", "./etc/one", b"1"), ("hardlink", "./etc/two", "./etc/one"),
        ("link", "./etc/abs", "/etc/one"), ("fifo", "./pipe", ""), ("file", "/rooted", b"2"),
    )  # fmt: skip
    target = filled(tmp_path, squeeze(raw), f"image{ending}")
    assert (target / "etc/two").read_bytes() == b"1"
    assert (target / "etc/one").stat().st_ino == (target / "etc/two").stat().st_ino
    assert os.readlink(target / "etc/abs") == "/etc/one"
    assert (target / "rooted").read_bytes() == b"2"
    assert look_at(str(tmp_path / f"image{ending}")).name.startswith("image-")


@pytest.mark.parametrize("damage", ["cut", "flipped", "no tar"])
def test_damaged_tarballs_leave_nothing(opened: Opener, tmp_path: Path, damage: str) -> None:
    raw = gzip.compress(tarball(("file", "a", os.urandom(100_000)), ("file", "b", b"")))
    if damage == "cut":
        raw = raw[:50_000]
    elif damage == "flipped":
        raw = raw[:60_000] + bytes([raw[60_000] ^ 255]) + raw[60_001:]
    else:
        raw = b"this is no archive" * 100
    (tmp_path / "bad.tar.gz").write_bytes(raw)
    pool = opened("copy")
    with pytest.raises(UserError, match="no whole tar archive"):
        pool.import_image(str(tmp_path / "bad.tar.gz"))
    assert pool.images() == []
    assert pool.unclaimed(set(), set()) == []


def test_what_is_no_image_is_said(tmp_path: Path, opened: Opener) -> None:
    pool = opened("copy")
    for source in (str(tmp_path / "none"), "x" * 300, "a\0b", "~nobody-of-that-name/x"):
        with pytest.raises(UserError, match=r"no such image|cannot be looked for"):
            pool.import_image(source)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="neither a folder nor a file"):
        pool.import_image(str(tmp_path / "pipe"))
    with pytest.raises(PoolError, match="no image"):
        pool.create("box", "none")


def test_one_source_is_imported_once(opened: Opener, image: Path) -> None:
    pool = opened("copy")
    name = pool.import_image(str(image))
    assert pool.import_image(str(image)) == name
    assert pool.import_image(name) == name
    (image / "etc/hosts").write_text("changed\n")
    other = pool.import_image(str(image))
    assert pool.images() == sorted([name, other]) and other != name


def test_a_tarball_is_known_by_what_the_file_system_says_of_it(opened: Opener, tmp_path: Path) -> None:
    pool, source = opened("copy"), tmp_path / "image.tar"
    source.write_bytes(tarball(("file", "a", b"1")))
    name = pool.import_image(str(source))
    assert pool.import_image(str(source)) == name
    # as long as before, and with the old time set back on it
    times = source.stat().st_atime_ns, source.stat().st_mtime_ns
    time.sleep(0.05)
    source.write_bytes(tarball(("file", "a", b"2")))
    os.utime(source, ns=times)
    other = pool.import_image(str(source))
    assert other != name and pool.images() == sorted([name, other])


def test_a_source_that_changes_while_it_is_read_is_no_image(
    opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, source = opened("copy"), tmp_path / "image.tar"
    source.write_bytes(tarball(("file", "a", b"1")))
    unpack = archive.unpack

    def while_written(path: Path, target: Path, what: str) -> None:
        unpack(path, target, what)
        source.write_bytes(tarball(("file", "a", b"1234")))

    monkeypatch.setattr(archive, "unpack", while_written)
    with pytest.raises(UserError, match="changed while it was read"):
        pool.import_image(str(source))
    assert pool.images() == [] and os.listdir(tmp_path / "pool/trash") == []


STATUS = """\
Package: bash
Status: install ok installed
Architecture: amd64
Version: 5.2
Depends: base-files (>= 1), debianutils | other
Pre-Depends: libc6 (>= 2),
 libtinfo6

Package: coreutils
Status: install ok installed
Version: 9.1

Package: libc6
Status: install ok installed
Version: 2.36

Package: libtinfo6
Status: install ok installed
Version: 6

Package: other
Status: install ok installed
Version: 1
Provides: virtual (= 1)

Package: python3
Status: install ok installed
Version: 3
Depends: virtual, gone-from-here

Package: git
Status: deinstall ok config-files
Version: 2
"""


def test_the_closure_of_packages() -> None:
    packages = host_image.installed(STATUS)
    assert "git" not in packages
    chosen = host_image.closure(packages, ["bash", "python3", "git"])
    assert [package.name for package in chosen] == ["bash", "libc6", "libtinfo6", "other", "python3"]
    newer = host_image.closure(host_image.installed(STATUS.replace("2.36", "2.37")), ["bash", "python3"])
    assert host_image.digest(chosen) != host_image.digest(newer)


def test_a_machine_without_dpkg_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no dpkg database"):
        host_image.chosen_packages(tmp_path)
    (tmp_path / "var/lib/dpkg").mkdir(parents=True)
    (tmp_path / "var/lib/dpkg/status").write_text(
        "Package: nothing\nStatus: install ok installed\nVersion: 1\n"
    )
    with pytest.raises(UserError, match="not installed here: bash, coreutils, libc6"):
        host_image.chosen_packages(tmp_path)


def machine(root: Path) -> None:
    """A small merged-usr machine with an alternative, and secrets."""
    (root / "var/lib/dpkg/info").mkdir(parents=True)
    (root / "var/lib/dpkg/alternatives").mkdir()
    (root / "var/lib/dpkg/status").write_text(STATUS)
    for folder in ("usr/bin", "usr/share/doc/bash", "usr/share/man/man1", "etc/alternatives", "etc/ssh"):
        (root / folder).mkdir(parents=True)
    (root / "bin").symlink_to("usr/bin")
    for name in ("bash", "tool", "mawk", "private"):
        (root / "usr/bin" / name).write_text(name)
    (root / "usr/share/doc/bash/README").write_text("doc")
    (root / "etc/shadow").write_text("root:secret")
    (root / "etc/ssh/key").write_text("secret")
    (root / "etc/machine-id").write_text("secret")
    (root / "usr/bin/awk").symlink_to("/etc/alternatives/awk")
    (root / "etc/alternatives/awk").symlink_to("/usr/bin/mawk")
    (root / "etc/alternatives/pager").symlink_to("/usr/bin/private")
    (root / "var/lib/dpkg/alternatives/awk").write_text("auto\n/usr/bin/awk\n\n/usr/bin/mawk\n5\n")
    (root / "var/lib/dpkg/alternatives/pager").write_text("auto\n/usr/bin/pager\n\n/usr/bin/private\n5\n")
    (root / "var/lib/dpkg/info/bash.list").write_text(
        "/.\n/bin\n/bin/bash\n/bin/tool\n/usr/share/doc\n/usr/share/doc/bash/README\n/etc/ssh/key\n/bin/absent\n"
    )
    (root / "var/lib/dpkg/info/libc6.list").write_text("/bin/tool\n")
    (root / "var/lib/dpkg/info/coreutils.list").write_text("/usr/bin/mawk\n")


def test_the_image_of_a_machine(tmp_path: Path) -> None:
    root, target = tmp_path / "machine", tmp_path / "target"
    target.mkdir()
    machine(root)
    packages = host_image.closure(host_image.installed(STATUS), ["bash", "coreutils"])
    assert host_image.fill(target, packages, root) == []
    assert sorted(path.name for path in (target / "usr/bin").iterdir()) == [
        "awk", "bash", "mawk", "tool",
    ]  # fmt: skip
    assert os.readlink(target / "bin") == "usr/bin"
    assert (target / "bin/tool").read_text() == "tool"
    assert not (target / "usr/share/doc").exists()
    assert not (target / "etc/ssh").exists() and not (target / "etc/shadow").exists()
    assert (target / "etc/machine-id").read_text() == ""
    assert (target / "tmp").stat().st_mode & 0o7777 == 0o1777
    assert "root:x:0:0" in (target / "etc/passwd").read_text()


def test_the_image_of_a_machine_with_more_of_it(tmp_path: Path) -> None:
    tools, target = tmp_path / "tools", tmp_path / "target"
    (tools / "bin").mkdir(parents=True)
    (tools / "bin/mine").write_text("mine")
    single = tmp_path / "single.py"
    single.write_text("single")
    target.mkdir()
    machine(tmp_path / "machine")
    assert host_image.more(f"host+other,{tools},bash") == (["bash", "other"], [tools])
    packages = host_image.chosen_packages(tmp_path / "machine", extra=["other"])
    assert "other" in [package.name for package in packages]
    host_image.fill(target, packages, tmp_path / "machine", [tools, single])
    assert (target / tools.relative_to("/") / "bin/mine").read_text() == "mine"
    assert (target / single.relative_to("/")).read_text() == "single"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("host+no-such-package", "not installed here: no-such-package; 'apt-get install no-such-package'"),
        ("host+/no/such/folder", "no file or folder /no/such/folder on this machine"),
        ("host+", "'' is neither the name of a Debian package nor"),
        ("host+a b", "'a b' is neither"),
    ],
)
def test_what_the_host_image_cannot_be_given_is_named(source: str, words: str) -> None:
    if not Path("/var/lib/dpkg/status").is_file():
        pytest.skip("needs a machine with dpkg")
    with pytest.raises(UserError, match=words):
        look_at(source)


def test_the_image_of_this_machine_runs(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    need_root()
    if not Path("/var/lib/dpkg/status").is_file():
        pytest.skip("needs a machine with dpkg")
    monkeypatch.setattr(host_image, "WANTED", small_image.WHOLE)
    pool = opened("copy")
    name = pool.import_image("host")
    assert name.startswith("host-")
    assert pool.import_image("host") == name
    pool.create("box", name)
    root = pool.mount("box")
    done = subprocess.run(
        ["chroot", str(root), "sh", "-c", "bash -c 'echo $((6*7))'; ls / | grep -c workspace; id -un"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["42", "1", "root"], done.stderr
    assert not (root / "etc/shadow").exists()
    for path in state(root):
        assert "ssh_host" not in path and not path.startswith("/root/.ssh")
    private = root / "etc/ssl/private"
    assert not private.exists() or list(private.iterdir()) == []
