"""The kernel's programs of `network.sharing`: where they lie, and what their maps hold.

They are rebuilt with clang by ``python -m windtunnel.network.sharing.live.native``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from windtunnel.linux import bpf

Array = NDArray[Any]
By = Literal["source", "destination", "mark", "cgroup"]
OBJECT = bpf.Object(Path(__file__).parent / "bpf" / "gap.bpf.c", "windtunnel.network.sharing.live.native")
LEVELS = 8
"""How deep cgroups are told apart; place 0 of all arrays is of packets that are no entity's."""
ALLOWED = np.dtype([(name, "<u4") for name in ("rate", "lent", "limit", "mark")])
STATES = np.dtype([(name, "<u8") for name in ("lock", "last", "gap", "passed", "dropped", "marked")])
COMMON = np.dtype(
    [("until", "<u8"), ("levels", "<u4"), ("change", "<u4"), ("line", "<u8"), ("made", "<u4"), ("pad", "<u4")]
)
NAMES = np.dtype([("name", "S32"), ("weight", "<f8"), ("rate", "<f8")])
"""For those who set and lend, not for the program: of each entity, ``rate`` NaN where its weight decides."""
CLEARED = 0xFFFFFFFF
"""As ``change``: who lends is to end."""
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
        "names": bpf.Map(bpf.ARRAY, 4, NAMES.itemsize, entities, "names"),
        _KEYS[by]: bpf.Map(kind, size, 4, max(keys, 1), _KEYS[by]),
    }


def keys_of(maps: Mapping[str, bpf.Map]) -> bpf.Map:
    """The map from keys to places."""
    return next(maps[name] for name in _SIZES if name in maps)


def load(by: By, maps: Mapping[str, bpf.Map], *, trial: bool = False, source: bpf.Object = OBJECT) -> int:
    """The program that tells by ``by``; of a ``trial`` the packets' own time stamps are the clock. A
    descriptor. Raises OSError."""
    name = f"trial_{by}" if trial else by
    (program,) = (program for program in source.programs() if program.name == name)
    return bpf.loaded(program, maps)


def put(table: bpf.Map, values: Array) -> None:
    """All of a map of arrays, from an array of its kind."""
    table.put(np.arange(len(values), dtype="<u4").tobytes(), values.tobytes())


def read(maps: Mapping[str, bpf.Map], name: str) -> Array:
    """A map of arrays, which may be written to `put` it back."""
    kinds = {"allowed": ALLOWED, "states": STATES, "common": COMMON, "names": NAMES}
    return np.frombuffer(bytearray(maps[name].all(locked=name == "states")), kinds[name])


def close(maps: Mapping[str, bpf.Map]) -> None:
    """Let go of the descriptors."""
    for map_ in maps.values():
        os.close(map_.fd)


if __name__ == "__main__":
    OBJECT.rebuild()
