"""Images of a registry, by skopeo, from a server of the OCI distribution's reading half on loopback."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import shutil
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from windtunnel.agents.sandbox.files import Pool, open_pool
from windtunnel.base.errors import UserError

pytestmark = [pytest.mark.conformance, pytest.mark.root]
ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
OF_MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def tarball(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return gzip.compress(buffer.getvalue(), mtime=0)


class Registry:
    """``address``: where it answers; ``asked``: the digests of blobs that were read."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.tags: dict[str, str] = {}
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                last = self.path.rsplit("/", 1)[1]
                digest = registry.tags.get(self.path, last)
                data = b"{}" if self.path == "/v2/" else registry.blobs.get(digest, b"")
                self.send_response(200 if data else 404)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Content-Type", OF_MANIFEST if "/manifests/" in self.path else "x/y")
                self.send_header("Docker-Content-Digest", digest)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(data)

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                """Nothing is told."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def blob(self, data: bytes, kind: str) -> dict[str, object]:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.blobs[digest] = data
        return {"digest": digest, "size": len(data), "mediaType": f"application/vnd.oci.image.{kind}"}

    def image(self, name: str, *layers: bytes) -> str:
        """Put an image there; how it is named."""
        sums = [f"sha256:{hashlib.sha256(gzip.decompress(layer)).hexdigest()}" for layer in layers]
        config = {
            "os": "linux", "architecture": ARCHITECTURE, "rootfs": {"type": "layers", "diff_ids": sums},
        }  # fmt: skip
        manifest = {
            "schemaVersion": 2,
            "mediaType": OF_MANIFEST,
            "config": self.blob(json.dumps(config).encode(), "config.v1+json"),
            "layers": [self.blob(layer, "layer.v1.tar+gzip") for layer in layers],
        }
        descriptor = self.blob(json.dumps(manifest).encode(), "manifest.v1+json")
        self.tags[f"/v2/{name}/manifests/latest"] = str(descriptor["digest"])
        self.tags[f"/v2/{name}/tags/list"] = self.blob(
            json.dumps({"name": name, "tags": ["latest"]}).encode(), "x"
        )["digest"]  # type: ignore[assignment]
        return f"docker://{self.address}/{name}:latest"


@pytest.fixture
def registry() -> Iterator[Registry]:
    if shutil.which("skopeo") is None:
        pytest.skip("needs skopeo")
    registry = Registry()
    yield registry
    registry.server.shutdown()
    registry.server.server_close()


def test_images_of_a_registry_share_their_layers(registry: Registry, tmp_path: Path) -> None:
    base = tarball(base=os.urandom(8 << 20), common=b"lower")
    first = registry.image("one", base, tarball(own=b"first"))
    second = registry.image("two", base, tarball(own=b"second", common=b"upper"))
    pool = open_pool(tmp_path / "pool", size=256 << 20)
    try:
        first_image = pool.import_image(first)
        pool.create("a", first_image)
        before, _ = pool.usage()
        second_image = pool.import_image(second)
        pool.create("b", second_image)
        pool.flush("b")
        assert pool.import_image(first) == first_image and sorted(pool.images()) == sorted(
            {first_image, second_image}
        )
        assert pool.usage()[0] - before < 4 << 20, "the layer that both have is there once"
        roots = pool.mount("a"), pool.mount("b")
        assert [(root / "own").read_text() for root in roots] == ["first", "second"]
        assert [(root / "common").read_text() for root in roots] == ["lower", "upper"]
        assert roots[0].joinpath("base").read_bytes() == roots[1].joinpath("base").read_bytes()
        registry.blobs.pop(f"sha256:{hashlib.sha256(base).hexdigest()}")
        third = registry.image("three", tarball(own=b"third"))
        registry.tags.clear()
        with pytest.raises(UserError, match="skopeo cannot have it"):
            pool.import_image(third)
        assert pool.unclaimed({"a", "b"}, set()) == []
    finally:
        pool.close(unmount=True)


def test_without_skopeo_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    pool = Pool(tmp_path / "pool")
    with pytest.raises(UserError, match=r"image 'docker://debian': that needs skopeo; 'apt-get install"):
        pool.import_image("docker://debian")
