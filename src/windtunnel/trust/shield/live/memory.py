"""A shield before memory that somebody else owns: what goes out is sealed, what comes in is checked.

A chunk is sealed by AES-256-GCM with the nonce index (32 bits) | version (64), and a version never comes
twice: its upper 24 bits count how often the shield was opened, which is on disk before anything is written;
the lower 40 count writes. What is on chip lies in a file that is as trusted as the shield itself. What was
written after the last `Shield.save` before a crash is refused.

Source: Zhao et al., ShEF (ASPLOS 2022), Shield: engine sets by region, counters on chip for what is read and
written. Its public code ties the counters to zero: that is the mode ``mac``.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from windtunnel.base import atomic
from windtunnel.base.errors import HostError, UserError
from windtunnel.trust.shield.model import ARITY, DIGEST, NONCE, Region

EPOCH = 40  # bits below the count of openings


class Tampered(HostError):
    """What came from behind the shield is not what was last written there."""


class Shield:
    """``memory``: at least the sum of the regions' ``room`` (bytes), in anybody's hands. ``state``: the file
    of what is on chip (key, openings, versions, roots), made if it is not there. Raises UserError: the memory
    is too small, or the state is of other regions."""

    def __init__(self, memory: bytearray | memoryview, regions: Sequence[Region], state: Path) -> None:
        view, layout, new = memoryview(memory).cast("B"), repr(list(regions)), not state.exists()
        kept: dict[str, Any] = {"key": os.urandom(32).hex(), "layout": layout, "epoch": 0}
        if not new:
            kept = json.loads(state.read_text())
        if kept["layout"] != layout or sum(region.room for region in regions) > len(view):
            raise UserError(
                f"shield: {state} is of {kept['layout']}; these are {len(view)} bytes for {layout}"
            )
        self._path, self._kept, at = state, {**kept, "epoch": kept["epoch"] + 1}, 0
        self._areas = list[_Area]()
        for number, region in enumerate(regions):
            key = hmac.digest(bytes.fromhex(kept["key"]), repr((number, region)).encode(), "sha256")
            area = _Area(view[at : at + region.room], region, key, self._kept["epoch"] << EPOCH)
            area.start(None if new else bytes.fromhex(kept["regions"][number]))
            self._areas.append(area)
            at += region.room
        self.save()

    def read(self, address: int, length: int) -> bytes:
        """What was last written there; zeros where nothing was. Raises Tampered: that is not what lies there.
        UserError: it is in no region."""
        parts = self._split(address, length)
        return b"".join([area.read(index)[first:last] for area, index, first, last in parts])

    def write(self, address: int, data: bytes | bytearray | memoryview) -> None:
        """Put ``data`` there. Raises as `read` does: a chunk that is changed in part is read first."""
        view, at = memoryview(data).cast("B"), 0
        for area, index, first, last in self._split(address, len(view)):
            part: bytes | memoryview = view[at : at + last - first]
            if len(part) < area.region.chunk:
                old = area.read(index)
                part = b"".join((old[:first], part, old[last:]))
            area.write(index, part)
            at += last - first

    def save(self) -> None:
        """What is on chip is on the disk too, and survives a restart from here on."""
        kept = {
            **self._kept,
            "regions": [(area.root or area.versions.tobytes()).hex() for area in self._areas],
        }
        atomic.replace(self._path, json.dumps(kept), durable=True, mode=0o600)

    def _split(self, address: int, length: int) -> Iterator[tuple[_Area, int, int, int]]:
        """The chunks: their area and index, and from where to where in them."""
        for area in self._areas:
            region, at = area.region, address - area.region.base
            if at >= 0 and at + length <= region.length:
                end = at + length
                while at < end:
                    index, first = divmod(at, region.chunk)
                    last = min(region.chunk, first + end - at)
                    yield area, index, first, last
                    at += last - first
                return
        raise UserError(f"shield: {length} bytes from {address} on are in no region")


class _Area:
    """A region. What lies in memory is copied before it is checked: its owner may change it at any time."""

    def __init__(self, memory: memoryview, region: Region, key: bytes, epoch: int) -> None:
        self.region, self._memory, self._epoch = region, memory, epoch
        self._tree_key = hmac.digest(key, b"tree", "sha256")
        self._cipher, self._stride, self._mode = AESGCM(key), region.stride, region.mode
        self.versions, self.root = array("Q"), b""
        self._levels, at = list[tuple[int, int]](), region.chunks * region.stride
        for count, size in region.levels:
            self._levels.append((at, size))
            at += count * size

    def start(self, kept: bytes | None) -> None:
        """With what was on chip; None: as new."""
        if self._mode == "versions":
            self.versions = array("Q", bytes(8 * self.region.chunks) if kept is None else kept)
        elif kept is not None:
            self.root = kept
        elif self._mode == "mac":  # nothing on chip says which chunks were written
            for index in range(self.region.chunks):
                self.write(index, bytes(self.region.chunk))
        else:
            for level, (count, size) in enumerate(self.region.levels):
                whole, self.root = self.root.ljust(count * size, b"\0"), b""
                for place in range(count):
                    node = whole[place * size : (place + 1) * size]
                    self._node(level, place)[:] = node
                    self.root += self._digest(level, place, node)

    def read(self, index: int) -> bytes:
        at, mode, checked, start = index * self._stride, self._mode, None, 0
        sealed = bytes(self._memory[at : at + self._stride])
        if mode == "mac":
            nonce, checked, start = sealed[:NONCE], index.to_bytes(4, "big"), NONCE
        else:
            version = self.versions[index] if mode == "versions" else _at(self._nodes(index)[0], index)
            if not version:
                return bytes(self.region.chunk)
            nonce = index.to_bytes(4, "big") + version.to_bytes(8, "big")
        try:
            return self._cipher.decrypt(nonce, memoryview(sealed)[start:], checked)
        except InvalidTag:
            raise Tampered(f"shield: chunk {index} of {self.region} is not what was written last") from None

    def write(self, index: int, data: bytes | memoryview) -> None:
        at, checked = index * self._stride, None
        if self._mode == "mac":
            nonce, checked = os.urandom(NONCE), index.to_bytes(4, "big")
            self._memory[at : at + NONCE] = nonce
            at += NONCE
        else:
            nodes = self._nodes(index) if self._mode == "tree" else []
            version = max((_at(nodes[0], index) if nodes else self.versions[index]) + 1, self._epoch)
            nonce = index.to_bytes(4, "big") + version.to_bytes(8, "big")
            if nodes:
                self._climb(index, version, nodes)
            else:
                self.versions[index] = version
        # not sealed in place: its owner could change the ciphertext before the tag is made of it
        sealed = self._cipher.encrypt(nonce, data, checked)
        self._memory[at : at + len(sealed)] = sealed

    def _nodes(self, index: int) -> list[bytearray]:
        """From the block of versions that has a chunk's up to the top, checked from the root down."""
        nodes, expected = list[bytearray](), self.root
        for level in reversed(range(len(self._levels))):
            place, slot = index // ARITY ** (level + 1), index // ARITY**level % ARITY * DIGEST
            node = bytearray(self._node(level, place))
            if self._digest(level, place, node) != expected:
                raise Tampered(f"shield: node {place} of level {level} is not what was written last")
            nodes.insert(0, node)
            expected = bytes(node[slot : slot + DIGEST])
        return nodes

    def _climb(self, index: int, version: int, nodes: list[bytearray]) -> None:
        """Put a chunk's version in, and the digests above it up to the root."""
        put = version.to_bytes(8, "big")
        for level, node in enumerate(nodes):
            index, slot = index // ARITY, index % ARITY * len(put)
            node[slot : slot + len(put)] = put
            self._node(level, index)[:] = node
            put = self._digest(level, index, node)
        self.root = put

    def _node(self, level: int, place: int) -> memoryview:
        start, size = self._levels[level]
        return self._memory[start + place * size : start + (place + 1) * size]

    def _digest(self, level: int, place: int, node: bytes | bytearray) -> bytes:
        person = level.to_bytes(8, "big") + place.to_bytes(8, "big")
        return hashlib.blake2b(node, key=self._tree_key, person=person, digest_size=DIGEST).digest()


def _at(block: bytearray, index: int) -> int:
    return int.from_bytes(block[index % ARITY * 8 : index % ARITY * 8 + 8], "big")
