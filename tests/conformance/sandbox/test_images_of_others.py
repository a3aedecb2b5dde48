"""Images that others made: tarballs that would lead out, and OCI images by skopeo."""

from __future__ import annotations

import gzip
import hashlib
import json
import platform
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from agents.sandbox.files.pool_support import Opener, fill, filled, need_root, tarball
from windtunnel.agents.sandbox.files.source import look_at
from windtunnel.base.errors import UserError

ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


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
