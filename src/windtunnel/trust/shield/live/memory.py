"""A shield before memory that somebody else owns: what goes out is sealed, what comes in is checked.

A chunk is sealed by AES-256-GCM with the nonce index (32 bits) | version (64), and a version never comes
twice: its upper 24 bits count how often the shield was opened, which is on disk before anything is written;
the lower 40 count writes. What is on chip lies in a file that is as trusted as the shield itself. What was
written after the last `Shield.save` before a crash is refused.

Source: Zhao et al., ShEF (ASPLOS 2022), Shield: engine sets by region, counters on chip for what is read and
written. Its public code ties the counters to zero; the mode ``mac`` is as good as that.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from windtunnel.base import atomic
from windtunnel.base.errors import HostError, UserError
from windtunnel.trust.shield.model import ARITY, DIGEST, TAG, VERSION, Region

EPOCH = 40  # bits below the count of openings


class Tampered(HostError):
    """What came from behind the shield is not what was last written there."""


class Shield:
    """For one thread at a time. ``memory``: at least the sum of the regions' ``room`` (bytes), in anybody's
    hands. ``state``: the file of what is on chip (key, openings, versions, roots), made if it is not there.
    Raises UserError: the memory is too small, or the state is of other regions."""

    def __init__(self, memory: bytearray | memoryview, regions: Sequence[Region], state: Path) -> None:
        self._areas, self._path, layout = list[_Area](), state, repr(list(regions))
        view, on_chip = memoryview(memory).cast("B"), [None] * len(regions)
        self._on_chip_state: dict[str, Any] = {
            "layout": layout,
            "key": os.urandom(32).hex(),
            "openings": 0,
            "on_chip": on_chip,
        }
        if state.exists():
            self._on_chip_state = json.loads(state.read_text())
        if self._on_chip_state["layout"] != layout or sum(region.room for region in regions) > len(view):
            raise UserError(
                f"shield: {state} is of {self._on_chip_state['layout']}; {len(view)} bytes are for {layout}"
            )
        self._on_chip_state["openings"] += 1
        for region, before in zip(regions, self._on_chip_state["on_chip"], strict=True):
            key = hmac.digest(bytes.fromhex(self._on_chip_state["key"]), b"%d" % len(self._areas), "sha256")
            self._areas.append(
                _Area(view[: region.room], region, key, self._on_chip_state["openings"] << EPOCH, before)
            )
            view = view[region.room :]
        self.save()

    def read(self, address: int, length: int) -> bytes:
        """What was last written there; zeros where nothing was. Raises Tampered: that is not what lies there.
        UserError: it is in no region."""
        area, at = self._area(address, length)
        chunk = area.region.chunk
        chunks = [area.read(index) for index in range(at // chunk, -(-(at + length) // chunk))]
        return b"".join(chunks)[at % chunk : at % chunk + length]

    def write(self, address: int, data: bytes | bytearray | memoryview) -> None:
        """Put ``data`` there. Raises as `read` does: a chunk that is changed in part is read first."""
        view = memoryview(data).cast("B")
        area, at = self._area(address, len(view))
        chunk = area.region.chunk
        while view:
            index, first = divmod(at, chunk)
            part: bytes | memoryview = view[: chunk - first]
            at, view = at + len(part), view[len(part) :]
            if len(part) < chunk:
                old = area.read(index)
                part = b"".join((old[:first], part, old[first + len(part) :]))
            area.write(index, part)

    def save(self) -> None:
        """What is on chip is on the disk too, and survives a restart from here on."""
        self._on_chip_state["on_chip"] = [
            (area.root or area.versions.tobytes()).hex() for area in self._areas
        ]
        atomic.replace(self._path, json.dumps(self._on_chip_state), durable=True, mode=0o600)

    def _area(self, address: int, length: int) -> tuple[_Area, int]:
        """Where that is, and from where on in it."""
        for area in self._areas:
            at = address - area.region.base
            if 0 <= at <= area.region.length - length:
                return area, at
        raise UserError(f"shield: {length} bytes from {address} on are in no region")


class _Area:
    """A region. What lies in memory is copied before it is checked: its owner may change it at any time.
    ``kept``: what was on chip, hex; None: as new."""

    def __init__(
        self, memory: memoryview, region: Region, key: bytes, version: int, on_chip: str | None
    ) -> None:
        self.region, self._memory, self._next = region, memory, version
        self._cipher, self._stride, self._mode = AESGCM(key), region.stride, region.mode
        self._sealed = bytearray(region.chunk + TAG)  # a chunk on its way out
        self._tree_key, self.versions, self.root = hmac.digest(key, b"tree", "sha256"), array("Q"), b""
        self._levels, at = list[tuple[int, int]](), region.chunks * region.stride
        for count, size in region.levels:
            self._levels.append((at, size))
            at += count * size
        if self._mode == "versions":
            self.versions = array("Q", bytes.fromhex(on_chip) if on_chip else bytes(8 * self.region.chunks))
        elif on_chip is not None:
            self.root = bytes.fromhex(on_chip)
        elif self._mode == "mac":  # nothing on chip says which chunks were written
            for index in range(self.region.chunks):
                self.write(index, bytes(self.region.chunk))
        for level, (count, size) in enumerate(self.region.levels if on_chip is None else ()):
            whole, self.root = self.root.ljust(count * size, b"\0"), b""
            for place in range(count):
                self._node(level, place)[:] = node = whole[place * size : (place + 1) * size]
                self.root += self._digest(level, place, node)

    def read(self, index: int) -> bytes:
        sealed: bytes | memoryview = bytes(self._memory[index * self._stride : (index + 1) * self._stride])
        if self._mode == "versions":
            version = self.versions[index]
        elif self._mode == "tree":
            slot = index % ARITY * VERSION
            version = int.from_bytes(self._nodes(index)[0][slot : slot + VERSION], "big")
        else:
            version, sealed = int.from_bytes(sealed[:VERSION], "big"), memoryview(sealed)[VERSION:]
        if not version and self._mode != "mac":
            return bytes(self.region.chunk)
        try:
            return self._cipher.decrypt((index << 64 | version).to_bytes(12, "big"), sealed, None)
        except InvalidTag:
            raise Tampered(f"shield: chunk {index} of {self.region} is not what was written last") from None

    def write(self, index: int, data: bytes | memoryview) -> None:
        at, nonce = index * self._stride, (index << 64 | self._next).to_bytes(12, "big")
        end = at + self._stride
        if self._mode == "versions":
            self.versions[index] = self._next
        elif self._mode == "tree":
            self._climb(index, nonce[-VERSION:], self._nodes(index))
        else:
            self._memory[at : at + VERSION], at = nonce[-VERSION:], at + VERSION
        self._next += 1
        # not sealed in place: its owner could change the ciphertext before the tag is made of it
        self._cipher.encrypt_into(nonce, data, None, self._sealed)
        self._memory[at:end] = self._sealed

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

    def _climb(self, index: int, put: bytes, nodes: list[bytearray]) -> None:
        """Put a chunk's version in, and the digests above it up to the root."""
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


CHUNK, SIZE = 256, 9216  # bytes of a chunk, and of each of two regions: 36 chunks, three blocks of versions
# what the memory is made into, of what it is, what it was before the last writes, and bytes of a sealed chunk
ATTACKS: Mapping[str, Callable[[bytes, bytes, int], bytes]] = {
    "honest": lambda now, old, chunk: now,
    "data": lambda now, old, chunk: now[:20] + bytes([now[20] ^ 1]) + now[21:],
    "tag": lambda now, old, chunk: now[: chunk - 1] + bytes([now[chunk - 1] ^ 1]) + now[chunk:],
    "zeros": lambda now, old, chunk: bytes(chunk) + now[chunk:],
    "chunks swapped": lambda now, old, chunk: now[chunk : 2 * chunk] + now[:chunk] + now[2 * chunk :],
    "tags swapped": lambda now, old, chunk: now[: chunk - 16] + now[2 * chunk - 16 : 2 * chunk] + now[chunk:],
    "regions swapped": lambda now, old, chunk: now[len(now) // 2 :] + now[: len(now) // 2],
    "replay": lambda now, old, chunk: old[:chunk] + now[chunk:],
    "rollback": lambda now, old, chunk: old,
}


def attack(mode: str, folder: Path) -> dict[str, bool]:
    """By the name of each of `ATTACKS`, whether a shield of that mode detects it. Each strikes between two
    openings of a shield of its own, which wrote everything twice (its state lies in ``folder``). ``honest``:
    whether what nobody touched is as it was written. Raises UserError: there is no such mode."""
    regions, results = [Region(base, SIZE, CHUNK, mode) for base in (0, SIZE)], dict[str, bool]()
    for name, strike in ATTACKS.items():
        memory, state = bytearray(2 * regions[0].room), folder / f"{mode} {name}"
        shield = Shield(memory, regions, state)
        for content in (b"old", b"new"):
            before = bytes(memory)
            for region in regions:
                shield.write(region.base, content * (SIZE // 3))
        shield.save()
        memory[:] = strike(bytes(memory), before, regions[0].stride)
        try:
            shield = Shield(memory, regions, state)
            read = {shield.read(region.base, SIZE) for region in regions}
            results[name] = name == "honest" and read == {b"new" * (SIZE // 3)}
        except Tampered:
            results[name] = name != "honest"
    return results
