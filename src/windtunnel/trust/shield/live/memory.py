"""A shield before memory that somebody else owns: what is written goes out sealed, what comes in is checked.

A chunk is sealed by AES-256-GCM; its nonce is index (32 bits) | version (64 bits), and a version never comes
twice: its upper 24 bits count the times that the shield was opened, which is on disk before anything is
written; the lower 40 count writes of the chunk. What is on chip lies in a file that is as trusted as the
shield itself. After a crash, what was written since `Shield.save` is refused, and no nonce repeats.

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
from windtunnel.trust.shield.model import ARITY, DIGEST, NONCE, Region, node_size

EPOCH = 40  # bits below the count of openings


class Tampered(HostError):
    """What came from behind the shield is not what was last written there."""


class Shield:
    """``memory``: writable, at least the sum of the regions' ``room`` (bytes), in anybody's hands. ``state``:
    the file of what is on chip: the key, openings, versions and roots. It is made if it is not there."""

    def __init__(self, memory: bytearray | memoryview, regions: Sequence[Region], state: Path) -> None:
        self._memory, self._path = memoryview(memory).cast("B"), state
        if sum(region.room for region in regions) > len(self._memory):
            raise UserError(f"shield: {len(self._memory)} bytes of memory are too few for {list(regions)}")
        new = not state.exists()
        layout = repr(list(regions))
        kept: dict[str, Any] = {"key": os.urandom(32).hex(), "layout": layout, "epoch": 0}
        if not new:
            kept = json.loads(state.read_text())
        if kept["layout"] != layout:
            raise UserError(f"shield: {state} is of the regions {kept['layout']}, not {layout}")
        self._kept = {**kept, "epoch": kept["epoch"] + 1}
        self._areas, at = list[_Area](), 0
        for number, region in enumerate(regions):
            key = hmac.digest(bytes.fromhex(kept["key"]), repr((number, region)).encode(), "sha256")
            area = _Area(self._memory[at : at + region.room], region, key, self._kept["epoch"] << EPOCH)
            area.format() if new else area.restore(kept["regions"][number])
            self._areas.append(area)
            at += region.room
        self.save()

    def read(self, address: int, length: int) -> bytes:
        """What was last written there; zeros where nothing was.

        Raises:
            Tampered: that is not what lies there. UserError: it is in no region.
        """
        parts = [area.read(index)[first:last] for area, index, first, last in self._split(address, length)]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def write(self, address: int, data: bytes | bytearray | memoryview) -> None:
        """Put ``data`` there.

        Raises:
            Tampered: a chunk that is changed in part is not what was written. UserError: it is in no region.
        """
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
        kept = {**self._kept, "regions": [area.kept() for area in self._areas]}
        atomic.replace(self._path, json.dumps(kept), durable=True, mode=0o600)

    def _split(self, address: int, length: int) -> Iterator[tuple[_Area, int, int, int]]:
        """The chunks: their area and index, and from where to where in them."""
        for area in self._areas:
            region = area.region
            if region.base <= address and address + length <= region.base + region.length:
                at, end = address - region.base, address - region.base + length
                while at < end:
                    index, first = divmod(at, region.chunk)
                    last = min(region.chunk, first + end - at)
                    yield area, index, first, last
                    at += last - first
                return
        raise UserError(f"shield: {length} bytes from {address} on are in no region")


class _Area:
    """One region: its memory, and what is on chip for it. What lies in memory is copied before it is checked:
    its owner may change it at any instant."""

    def __init__(self, memory: memoryview, region: Region, key: bytes, epoch: int) -> None:
        self.region, self._memory, self._epoch = region, memory, epoch
        self._stride, self._mode = region.stride, region.mode
        self._cipher, self._tree_key = AESGCM(key), hmac.digest(key, b"tree", "sha256")
        self._versions = array("Q", bytes(8 * region.chunks if region.mode == "versions" else 0))
        self._root = b""
        self._starts, at = list[int](), region.chunks * region.stride
        for level, count in enumerate(region.levels):
            self._starts.append(at)
            at += count * node_size(level)

    def format(self) -> None:
        if self.region.mode == "mac":  # nothing on chip says which chunks were written
            for index in range(self.region.chunks):
                self.write(index, bytes(self.region.chunk))
        below = b""
        for level, count in enumerate(self.region.levels):
            size = node_size(level)
            whole, below = below.ljust(count * size, b"\0"), b""
            for place in range(count):
                node = whole[place * size : (place + 1) * size]
                self._node(level, place)[:] = node
                below += self._digest(level, place, node)
        self._root = below

    def kept(self) -> str:
        return self._root.hex() or self._versions.tobytes().hex()

    def restore(self, kept: str) -> None:
        if self.region.mode == "tree":
            self._root = bytes.fromhex(kept)
        else:
            self._versions = array("Q", bytes.fromhex(kept))

    def read(self, index: int) -> bytes:
        at, mode, checked, start = index * self._stride, self._mode, None, 0
        sealed = bytes(self._memory[at : at + self._stride])
        if mode == "mac":
            nonce, checked, start = sealed[:NONCE], index.to_bytes(4, "big"), NONCE
        else:
            version = self._versions[index] if mode == "versions" else _at(self._nodes(index)[0], index)
            if not version:
                return bytes(self.region.chunk)
            nonce = _nonce(index, version)
        try:
            return self._cipher.decrypt(nonce, memoryview(sealed)[start:], checked)
        except InvalidTag:
            raise Tampered(f"shield: chunk {index} of {self.region} is not what was written last") from None

    def write(self, index: int, data: bytes | memoryview) -> None:
        at, mode, checked = index * self._stride, self._mode, None
        if mode == "mac":
            nonce, checked = os.urandom(NONCE), index.to_bytes(4, "big")
            self._memory[at : at + NONCE] = nonce
            at += NONCE
        elif mode == "versions":
            version = self._versions[index] = max(self._versions[index] + 1, self._epoch)
            nonce = _nonce(index, version)
        else:
            nodes = self._nodes(index)
            version = max(_at(nodes[0], index) + 1, self._epoch)
            nonce = _nonce(index, version)
            self._climb(index, version, nodes)
        # not sealed in place: its owner could change the ciphertext before the tag is made of it
        sealed = self._cipher.encrypt(nonce, data, checked)
        self._memory[at : at + len(sealed)] = sealed

    def _nodes(self, index: int) -> list[bytearray]:
        """From the block of versions that has a chunk's up to the top, checked from the root down."""
        nodes, expected = list[bytearray](), self._root
        for level in reversed(range(len(self._starts))):
            place = index // ARITY ** (level + 1)
            node = bytearray(self._node(level, place))
            if self._digest(level, place, node) != expected:
                raise Tampered(f"shield: node {place} of level {level} is not what was written last")
            nodes.insert(0, node)
            slot = index // ARITY**level % ARITY
            expected = bytes(node[DIGEST * slot : DIGEST * (slot + 1)])
        return nodes

    def _climb(self, index: int, version: int, nodes: list[bytearray]) -> None:
        """Put a chunk's version in, and the digests above it up to the root."""
        put = version.to_bytes(8, "big")
        for level, node in enumerate(nodes):
            slot = index % ARITY * len(put)
            index //= ARITY
            node[slot : slot + len(put)] = put
            self._node(level, index)[:] = node
            put = self._digest(level, index, node)
        self._root = put

    def _node(self, level: int, place: int) -> memoryview:
        at, size = self._starts[level] + place * node_size(level), node_size(level)
        return self._memory[at : at + size]

    def _digest(self, level: int, place: int, node: bytes | bytearray) -> bytes:
        person = level.to_bytes(8, "big") + place.to_bytes(8, "big")
        return hashlib.blake2b(node, key=self._tree_key, person=person, digest_size=DIGEST).digest()


def _at(block: bytearray, index: int) -> int:
    slot = index % ARITY * 8
    return int.from_bytes(block[slot : slot + 8], "big")


def _nonce(index: int, version: int) -> bytes:
    return index.to_bytes(4, "big") + version.to_bytes(8, "big")
