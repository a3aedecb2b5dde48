"""Tarballs, OCI layouts and this machine's packages: what comes in, and what is refused."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import os
import platform
import shutil
import subprocess
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pool_support import Opener, need_root, state

from support import small_image
from windtunnel.agents.sandbox.errors import PoolError
from windtunnel.agents.sandbox.files import archive, host_image
from windtunnel.agents.sandbox.files.source import look_at
from windtunnel.base.errors import UserError

ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


def tarball(*members: tuple[str, str, bytes | str]) -> bytes:
    """Members as (kind, name, body or target)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for kind, name, body in members:
            member = tarfile.TarInfo(name)
            member.uid, member.gid = os.getuid(), os.getgid()
            if kind == "file":
                assert isinstance(body, bytes)
                member.size = len(body)
                tar.addfile(member, io.BytesIO(body))
                continue
            member.type = {
                "folder": tarfile.DIRTYPE, "link": tarfile.SYMTYPE, "hardlink": tarfile.LNKTYPE,
                "fifo": tarfile.FIFOTYPE, "device": tarfile.CHRTYPE, "odd": b"Z",
            }[kind]  # fmt: skip
            member.mode = 0o755
            member.linkname = str(body)
            member.devmajor, member.devminor = 1, 3
            tar.addfile(member)
    return out.getvalue()


def filled(tmp_path: Path, raw: bytes, name: str = "image.tar") -> Path:
    (tmp_path / name).write_bytes(raw)
    target = tmp_path / "target"
    target.mkdir()
    fill(tmp_path / name, target)
    return target


def fill(source: Path, target: Path) -> None:
    look_at(str(source)).fill(target, lambda text: None, 0, lambda count: None)


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


def test_links_among_parents_stay_inside(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    up = "../" * 20 + str(outside).lstrip("/")
    raw = tarball(
        ("link", "abs", str(outside)), ("file", "abs/evil", b"x"),
        ("link", "up", up), ("file", "up/evil", b"x"),
        ("link", "lib", "usr/lib"), ("file", "lib/good", b"y"),
        ("link", "file", str(outside / "evil")), ("file", "file", b"z"),
        ("link", "deep/inner/abs", "/etc"), ("file", "deep/inner/abs/conf", b"w"),
    )  # fmt: skip
    target = filled(tmp_path, raw)
    assert list(outside.iterdir()) == []
    assert (target / str(outside).lstrip("/") / "evil").read_bytes() == b"x"
    assert (target / "usr/lib/good").read_bytes() == b"y"
    assert (target / "etc/conf").read_bytes() == b"w"
    assert (target / "file").read_bytes() == b"z" and not (target / "file").is_symlink()


@pytest.mark.parametrize(
    ("members", "word"),
    [
        ([("file", "../evil", b"x")], "outside"),
        ([("file", "a/../../evil", b"x")], "outside"),
        ([("hardlink", "a", "../../etc/passwd")], "outside"),
        ([("hardlink", "a", "/etc/passwd")], "not in it"),
        ([("link", "a", "b"), ("link", "b", "a"), ("file", "a/x", b"")], "circle"),
        ([("file", "a", b""), ("file", "a/x", b"")], "no folder"),
        ([("odd", "a", "")], "not supported"),
    ],
)
def test_hostile_tarballs_are_refused(
    tmp_path: Path, members: list[tuple[str, str, bytes | str]], word: str
) -> None:
    with pytest.raises(UserError, match=word):
        filled(tmp_path, tarball(*members))
    assert not (tmp_path / "evil").exists()


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
    assert pool.leftovers(set(), set()) == []


def test_devices_are_no_way_to_the_host(opened: Opener, tmp_path: Path) -> None:
    need_root()
    (tmp_path / "image.tar").write_bytes(tarball(("device", "null", "")))
    pool = opened("btrfs")
    pool.create("box", pool.import_image(str(tmp_path / "image.tar")))
    with pytest.raises(PermissionError):
        (pool.mount("box") / "null").read_bytes()


OCI = "application/vnd.oci.image"


class Layout:
    """Writes an OCI image layout."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "blobs/sha256").mkdir(parents=True)
        (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def blob(self, raw: bytes) -> dict[str, Any]:
        name = hashlib.sha256(raw).hexdigest()
        (self.folder / "blobs/sha256" / name).write_bytes(raw)
        return {"digest": f"sha256:{name}", "size": len(raw)}

    def manifest(self, *layers: bytes, architecture: str = ARCHITECTURE) -> dict[str, Any]:
        plain = [gzip.decompress(layer) if layer[:2] == b"\x1f\x8b" else layer for layer in layers]
        sums = [f"sha256:{hashlib.sha256(each).hexdigest()}" for each in plain]
        config = {"os": "linux", "architecture": architecture, "rootfs": {"type": "layers", "diff_ids": sums}}
        kinds = [
            f"{OCI}.layer.v1.tar{'' if each is layer else '+gzip'}"
            for each, layer in zip(plain, layers, strict=True)
        ]
        body = {
            "schemaVersion": 2,
            "mediaType": f"{OCI}.manifest.v1+json",
            "config": {**self.blob(json.dumps(config).encode()), "mediaType": f"{OCI}.config.v1+json"},
            "layers": [
                {**self.blob(layer), "mediaType": kind} for layer, kind in zip(layers, kinds, strict=True)
            ],
        }
        about = {"mediaType": body["mediaType"], "platform": {"os": "linux", "architecture": architecture}}
        return {**self.blob(json.dumps(body).encode()), **about}

    def index(self, *manifests: dict[str, Any]) -> Path:
        (self.folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": manifests}))
        return self.folder


LOWER = tarball(
    ("folder", "keep", ""), ("file", "keep/a", b"lower"), ("file", "keep/b", b"lower"),
    ("folder", "full", ""), ("file", "full/old", b"lower"), ("folder", "full/sub", ""),
    ("file", "full/sub/old", b"lower"), ("folder", "gone", ""), ("file", "gone/x", b"lower"),
    ("link", "lib", "usr/lib"), ("folder", "usr/lib", ""),
)  # fmt: skip
UPPER = tarball(
    ("file", "keep/.wh.a", b""), ("file", "full/new", b"upper"), ("folder", "full/sub", ""),
    ("file", "full/sub/new", b"upper"), ("file", "full/.wh..wh..opq", b""), ("file", ".wh.gone", b""),
    ("file", "lib/so", b"upper"),
)  # fmt: skip
LAYERS = (gzip.compress(LOWER), UPPER)


@pytest.mark.parametrize("packed", [False, True])
def test_layers_of_an_oci_image_are_applied(tmp_path: Path, packed: bool) -> None:
    need_skopeo()
    layout = Layout(tmp_path / "layout")
    other = layout.manifest(tarball(("file", "wrong", b"")), architecture="sparc")
    manifests = {"schemaVersion": 2, "manifests": [other, layout.manifest(*LAYERS)]}
    nested = {**layout.blob(json.dumps(manifests).encode()), "mediaType": f"{OCI}.index.v1+json"}
    source = layout.index(nested)
    if packed:
        source = tmp_path / "packed.tar"
        with tarfile.open(source, "w") as tar:
            tar.add(layout.folder, arcname=".")
    target = tmp_path / "target"
    target.mkdir()
    assert len(look_at(str(source)).chain()) == 2
    fill(source, target)
    files = sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
    assert [file for file in files if not file.startswith("lib/")] == [
        "full/new", "full/sub/new", "keep/b", "usr/lib/so",
    ]  # fmt: skip


def test_a_damaged_oci_image_is_refused(tmp_path: Path) -> None:
    need_skopeo()
    layout = Layout(tmp_path / "layout")
    layout.index(layout.manifest(LAYERS[0]))
    digest = layout.blob(LAYERS[0])["digest"].split(":")[1]
    (layout.folder / "blobs/sha256" / digest).write_bytes(LAYERS[0][:-1] + b"?")
    (tmp_path / "target").mkdir()
    with pytest.raises(UserError, match=r"skopeo cannot have it .*[Dd]igest"):
        fill(layout.folder, tmp_path / "target")
    assert list((tmp_path / "target").iterdir()) == []
    (layout.folder / "index.json").write_text("{")
    with pytest.raises(UserError, match="skopeo cannot have it"):
        look_at(str(layout.folder)).chain()


def need_skopeo() -> None:
    if shutil.which("skopeo") is None:
        pytest.skip("needs skopeo")


def test_what_is_no_image_is_said(tmp_path: Path, opened: Opener) -> None:
    pool = opened("copy")
    with pytest.raises(UserError, match="no such image, file or folder"):
        pool.import_image(str(tmp_path / "none"))
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


@pytest.mark.parametrize("source", ["x" * 300, "a\0b", "~nobody-of-that-name/x"])
def test_a_path_that_cannot_be_is_refused(opened: Opener, source: str) -> None:
    with pytest.raises(UserError, match=r"cannot be looked for|no such image"):
        opened("copy").import_image(source)


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
    found = host_image.closure(packages, ["bash", "python3", "git"])
    assert [package.name for package in found] == ["bash", "libc6", "libtinfo6", "other", "python3"]
    newer = host_image.closure(host_image.installed(STATUS.replace("2.36", "2.37")), ["bash", "python3"])
    assert host_image.digest(found) != host_image.digest(newer)


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
    host_image.fill(target, packages, lambda text: None, root)
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
    host_image.fill(target, packages, lambda text: None, tmp_path / "machine", [tools, single])
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
