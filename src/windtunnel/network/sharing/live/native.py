"""The kernel's programs of `network.sharing`: where they lie, and what their maps hold.

They are rebuilt with clang by ``python -m windtunnel.network.sharing.live.native``.
"""

from __future__ import annotations

import ipaddress
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from windtunnel.linux import bpf

By = Literal["source", "destination", "mark", "cgroup"]
OBJECT = bpf.Object(Path(__file__).parent / "bpf" / "gap.bpf.c", "windtunnel.network.sharing.live.native")
OTHERS = 0
"""The place in `ALLOWED` and `STATES` of packets that are no entity's."""
ALLOWED = np.dtype([("rate", "<u4"), ("lent", "<u4"), ("limit", "<u4"), ("mark", "<u4")])
STATES = np.dtype(
    [
        ("lock", "<u8"),
        ("last", "<u8"),
        ("gap", "<u8"),
        ("passed", "<u8"),
        ("dropped", "<u8"),
        ("marked", "<u8"),
    ]
)
COMMON = np.dtype([("until", "<u8"), ("levels", "<u4"), ("pad", "<u4")])
_KEYS = {"source": "prefixes", "destination": "prefixes", "mark": "marks", "cgroup": "cgroups"}
_SIZES = {"prefixes": (bpf.LPM_TRIE, 20), "marks": (bpf.HASH, 4), "cgroups": (bpf.HASH, 8)}


def make_maps(by: By, entities: int, keys: int) -> dict[str, bpf.Map]:
    """The maps of a program that tells ``entities`` (with the others) apart by so many ``keys``. Raises
    OSError."""
    kind, size = _SIZES[_KEYS[by]]
    return {
        "allowed": bpf.Map(bpf.ARRAY, 4, ALLOWED.itemsize, entities, "allowed"),
        "states": bpf.Map(bpf.ARRAY, 4, STATES.itemsize, entities, "states", lock=True),
        "common": bpf.Map(bpf.ARRAY, 4, COMMON.itemsize, 1, "common"),
        _KEYS[by]: bpf.Map(kind, size, 4, max(keys, 1), _KEYS[by]),
    }


def keys_of(maps: Mapping[str, bpf.Map]) -> bpf.Map:
    """The map from keys to places."""
    return next(maps[name] for name in _SIZES if name in maps)


def prefixes_of(given: Iterable[tuple[str, int]]) -> tuple[bytes, bytes]:
    """Keys and values of the map of prefixes: IPv4 among IPv6, as ::ffff:a.b.c.d."""
    keys, values = bytearray(), bytearray()
    for prefix, place in given:
        net = ipaddress.ip_network(prefix)
        bits, address = net.prefixlen, net.network_address.packed
        if net.version == 4:
            bits, address = bits + 96, bytes(10) + b"\xff\xff" + address
        keys += struct.pack("<I16s", bits, address)
        values += struct.pack("<I", place)
    return bytes(keys), bytes(values)


def load(by: By, maps: Mapping[str, bpf.Map], *, trial: bool = False, source: bpf.Object = OBJECT) -> int:
    """The program that tells by ``by``; of a ``trial`` the packets' own time stamps are the clock. A
    descriptor. Raises OSError."""
    name = f"trial_{by}" if trial else by
    (program,) = (one for one in source.programs() if one.name == name)
    return bpf.loaded(program, maps)


def put_allowed(maps: Mapping[str, bpf.Map], allowed: np.ndarray) -> None:
    """``allowed``: an array of `ALLOWED`, one for each entity."""
    maps["allowed"].put(np.arange(len(allowed), dtype="<u4").tobytes(), allowed.tobytes())


def read(maps: Mapping[str, bpf.Map], name: str, kind: np.dtype) -> np.ndarray:
    """A map of arrays as an array of ``kind``."""
    return np.frombuffer(maps[name].all(locked=name == "states"), kind)


def close(maps: Mapping[str, bpf.Map]) -> None:
    """Let go of the descriptors."""
    for one in maps.values():
        os.close(one.fd)


if __name__ == "__main__":
    OBJECT.rebuild()
