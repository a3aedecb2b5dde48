"""A place for exports: a directory, or any URL that fsspec knows. All faults name the object."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from windtunnel.agents.sandbox.live.images.fault import ImageError
from windtunnel.base.errors import UserError

_BLOCK = 1 << 20


class Remote:
    """Objects below ``url``, named by relative paths with '/'."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec
            from fsspec.registry import known_implementations
        except ImportError:
            raise UserError(
                f"export to or import from {url} needs the Python package fsspec: pip install fsspec"
            ) from None
        protocol = url.split("://", 1)[0] if "://" in url else "file"
        try:
            fs, root = fsspec.core.url_to_fs(url)
        except ImportError as error:
            known = known_implementations.get(protocol, {}).get("err", str(error))
            raise UserError(
                f"{url} cannot be used: for {protocol}:// {known[:1].lower()}{known[1:]}"
            ) from None
        except ValueError as error:
            raise UserError(f"{url} cannot be used: {error}") from None
        self.url = url.rstrip("/")
        self.local = protocol in ("file", "local")
        self._fs: Any = fs
        self._root = root.rstrip("/")
        # another process may have written there since this one last looked
        self._fs.invalidate_cache()

    def name(self, path: str) -> str:
        return f"{self.url}/{path}"

    def write(self, path: str, data: bytes) -> None:
        with self._told(path, "written"):
            self._fs.makedirs(self._at(path).rsplit("/", 1)[0], exist_ok=True)
            self._fs.pipe_file(self._at(path), data)

    def upload(self, source: Path, path: str) -> None:
        with self._told(path, "written"):
            self._fs.makedirs(self._at(path).rsplit("/", 1)[0], exist_ok=True)
            self._fs.put_file(str(source), self._at(path))

    def read(self, path: str, at: int | None = None, length: int = 0) -> bytes:
        """A whole object, or exactly ``length`` bytes of it from ``at`` on."""
        with self._told(path, "read"):
            if at is None:
                whole: bytes = self._fs.cat_file(self._at(path))
                return whole
            part: bytes = self._fs.cat_file(self._at(path), start=at, end=at + length) if length else b""
        if len(part) != length:
            raise ImageError(f"{self.name(path)} is cut short")
        return part

    def download(self, path: str, into: Path, size: int, digest: str) -> None:
        """Fetch an object, which must have this size and SHA-256."""
        with self._told(path, "read"):
            self._fs.get_file(self._at(path), str(into))
        found = hashlib.sha256()
        with into.open("rb") as file:
            while block := file.read(_BLOCK):
                found.update(block)
        if into.stat().st_size != size:
            raise ImageError(f"{self.name(path)} is cut short: {into.stat().st_size} bytes instead of {size}")
        if found.hexdigest() != digest:
            raise ImageError(f"{self.name(path)} is damaged: it does not match its checksum")

    def size(self, path: str) -> int:
        with self._told(path, "read"):
            return int(self._fs.size(self._at(path)))

    def folders(self, path: str) -> list[str]:
        """Names right below ``path``; none when it is not there."""
        with self._told(path, "listed"):
            try:
                found = self._fs.ls(self._at(path), detail=False)
            except FileNotFoundError:
                return []
        return sorted(str(one).rstrip("/").rsplit("/", 1)[-1] for one in found)

    def exists(self, path: str) -> bool:
        with self._told(path, "read"):
            return bool(self._fs.exists(self._at(path)))

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"

    @contextlib.contextmanager
    def _told(self, path: str, what: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise ImageError(f"{self.name(path)} is missing") from None
        except ImageError:
            raise
        except Exception as error:  # every store has exceptions of its own
            raise ImageError(f"{self.name(path)} cannot be {what}: {error}") from error
