"""Manifests: plain data with a kind, a version and a checksum, so that nothing else is taken for one.

A manifest is one line of JSON in its only form (keys sorted, no blanks): ``check`` (BLAKE2b of the others),
``kind``, ``value`` and ``version``. Reading is strict: a file is accepted only if writing what was read gives
the same bytes, so a byte that was cut off, changed or added anywhere is found.
"""

from __future__ import annotations

import hashlib
import json
from typing import TypeVar

from windtunnel.base.plain import canonical, from_plain, to_plain
from windtunnel.store.objects.files import ObjectError, OtherVersion

T = TypeVar("T")


def checksum(data: bytes) -> str:
    """BLAKE2b of 20 bytes, hexadecimal."""
    return hashlib.blake2b(data, digest_size=20).hexdigest()


def seal(kind: str, version: int, value: object) -> bytes:
    """``value``, a dataclass or plain data, as a line of JSON with its kind, version and checksum.

    Raises:
        ValueError: a number in it has no JSON.
    """
    whole = {"kind": kind, "value": to_plain(value), "version": version}
    return canonical({**whole, "check": checksum(canonical(whole))}) + b"\n"


def unseal(record: type[T], kind: str, version: int, data: bytes, where: str) -> T:
    """The dataclass ``record`` that `seal` was given; ``where`` names the file in errors.

    Raises:
        ObjectError: truncated, damaged, or of another kind.
        OtherVersion: of another version.
    """
    try:
        whole = json.loads(data)
    except (ValueError, RecursionError):
        raise ObjectError(f"{where} is truncated or damaged") from None
    if not isinstance(whole, dict) or whole.get("kind") != kind:
        raise ObjectError(f"{where} is damaged or foreign: it is no {kind}")
    if whole.get("version") != version:
        raise OtherVersion(f"{where} has version {whole.get('version')!r}; version {version} is read")
    try:
        intact = data == seal(kind, version, whole.get("value"))
    except (ValueError, RecursionError):  # ValueError: a number that is not finite, such as 1E999
        intact = False
    if not intact:
        raise ObjectError(f"{where} is damaged: it does not match its checksum")
    try:
        return from_plain(record, whole["value"])
    except (TypeError, ValueError, KeyError) as error:
        raise ObjectError(f"{where} is no {kind} of this version: {error}") from None
