"""What storage says of a step: one manifest for each shard, and one, written last, that makes the step.

Both are JSON with a format, a version, and at the end a seal (SHA-256 of all before it), so a truncated,
changed or foreign file is told from a whole one.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from windtunnel.base.errors import HostError

FORMAT = "windtunnel checkpoint"
VERSION = 1


class StorageError(HostError):
    """A checkpoint in storage is damaged, missing or cannot be written; the message names which."""


class OtherVersion(StorageError):
    """A manifest of another version: what it names is not known here."""


@dataclass(frozen=True)
class ChunkFile:
    """A piece of a shard: ``name`` its file in ``chunks/``, which begins with the SHA-256 of its ``nbytes``
    bytes."""

    name: str
    nbytes: int

    @property
    def digest(self) -> str:
        return self.name.partition(".")[0]


@dataclass(frozen=True)
class ShardManifest:
    """One shard of one step; fields as in `checkpoint.model.Copy`. ``chunks``: its data, in order."""

    shard: str
    step: int
    world: int
    has_shared: bool
    generation: int
    layout: str
    nbytes: int
    checksum: str
    chunks: tuple[ChunkFile, ...]


@dataclass(frozen=True)
class ShardEntry:
    """A shard as the step's manifest knows it; ``seal``: of the shard's manifest."""

    shard: str
    nbytes: int
    checksum: str
    layout: str
    seal: str


@dataclass(frozen=True)
class StepManifest:
    """A complete step."""

    step: int
    world: int
    has_shared: bool
    generation: int
    shards: tuple[ShardEntry, ...]


def to_bytes(manifest: ShardManifest | StepManifest) -> bytes:
    """The manifest as it is written."""
    kind = "shard" if isinstance(manifest, ShardManifest) else "step"
    body = {"format": FORMAT, "version": VERSION, "kind": kind, **asdict(manifest)}
    text = json.dumps(body, separators=(",", ":"))
    return (text[:-1] + f',"seal":"{seal(text)}"}}\n').encode()


def seal(text: str) -> str:
    """SHA-256 of ``text``."""
    return hashlib.sha256(text.encode()).hexdigest()


def sealed(data: bytes) -> str:
    """The seal in a manifest that `shard_of` or `step_of` accepts."""
    return str(json.loads(data)["seal"])


def shard_of(data: bytes, name: str) -> ShardManifest:
    """The inverse of `to_bytes`; ``name`` is for the message.

    Raises:
        StorageError: truncated, damaged, foreign, or of another version.
    """
    body = _body(data, name, "shard")
    return _made(
        lambda: ShardManifest(**{**body, "chunks": tuple(ChunkFile(**one) for one in body["chunks"])}), name
    )


def step_of(data: bytes, name: str) -> StepManifest:
    """The inverse of `to_bytes`; ``name`` is for the message.

    Raises:
        StorageError: truncated, damaged, foreign, or of another version.
    """
    body = _body(data, name, "step")
    return _made(
        lambda: StepManifest(
            **{
                **body,
                "shards": tuple(ShardEntry(**one) for one in body["shards"]),
            }
        ),
        name,
    )


def _made(make: Any, name: str) -> Any:
    try:
        return make()
    except (TypeError, KeyError, AttributeError) as error:
        raise StorageError(f"{name} is not a manifest of this version: {error}") from error


def _body(data: bytes, name: str, kind: str) -> dict[str, Any]:
    try:
        text = data.decode()
        body = json.loads(text)
    except ValueError as error:
        raise StorageError(f"{name} is truncated or damaged") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT or body.get("kind") != kind:
        raise StorageError(f"{name} is no {kind} manifest of {FORMAT!r}")
    if body.get("version") != VERSION:
        raise OtherVersion(f"{name} has version {body.get('version')!r}; version {VERSION} is read")
    before, found, after = text.rpartition(',"seal":"')
    if not found or after != f'{seal(before + "}")}"}}\n':
        raise StorageError(f"{name} is truncated or damaged")
    for field in ("format", "version", "kind", "seal"):
        body.pop(field)
    return body
