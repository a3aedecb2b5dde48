"""What the owner of the memory can do to what lies there, and whether a shield finds it out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from windtunnel.trust.shield.live.memory import Shield, Tampered
from windtunnel.trust.shield.model import Region

CHUNK, SIZE = 256, 9216  # bytes of a chunk, and of each of two regions: 36 chunks, three blocks of versions


def attack(mode: str, folder: Path) -> dict[str, bool]:
    """By the name of each of `ATTACKS`, whether a shield of that mode detects it. Each strikes between two
    openings of a shield of its own, which wrote everything twice (its state lies in ``folder``). ``honest``:
    whether what nobody touched is as it was written. Raises UserError: there is no such mode."""
    regions, found = [Region(base, SIZE, CHUNK, mode) for base in (0, SIZE)], dict[str, bool]()
    for name, strike in ATTACKS.items():
        memory = bytearray(2 * regions[0].room)
        shield = Shield(memory, regions, folder / f"{mode} {name}")
        for content in (b"old", b"new"):
            before = bytes(memory)
            for region in regions:
                shield.write(region.base, content * (SIZE // 3))
        shield.save()
        strike(memory, before, regions[0].stride, regions[0].room)
        try:
            shield = Shield(memory, regions, folder / f"{mode} {name}")
            read = {shield.read(region.base, SIZE) for region in regions}
            found[name] = name == "honest" and read == {b"new" * (SIZE // 3)}
        except Tampered:
            found[name] = name != "honest"
    return found


def _put(memory: bytearray, at: int, data: bytes) -> None:
    memory[at : at + len(data)] = data


def _swap(memory: bytearray, at: int, other: int, length: int) -> None:
    mine, theirs = memory[at : at + length], memory[other : other + length]
    memory[at : at + length], memory[other : other + length] = theirs, mine


ATTACKS: Mapping[str, Callable[[bytearray, bytes, int, int], None]] = {
    "honest": lambda memory, before, chunk, region: None,
    "data": lambda memory, before, chunk, region: _put(memory, 20, bytes([memory[20] ^ 1])),
    "tag": lambda memory, before, chunk, region: _put(memory, chunk - 1, bytes([memory[chunk - 1] ^ 1])),
    "zeros": lambda memory, before, chunk, region: _put(memory, 0, bytes(chunk)),
    "chunks swapped": lambda memory, before, chunk, region: _swap(memory, 0, chunk, chunk),
    "tags swapped": lambda memory, before, chunk, region: _swap(memory, chunk - 16, 2 * chunk - 16, 16),
    "regions swapped": lambda memory, before, chunk, region: _swap(memory, 0, region, region),
    "replay": lambda memory, before, chunk, region: _put(memory, 0, before[:chunk]),
    "rollback": lambda memory, before, chunk, region: _put(memory, 0, before),
}
