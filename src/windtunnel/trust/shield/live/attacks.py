"""What the owner of the memory can do to what lies there, and whether a shield finds it out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from windtunnel.trust.shield.live.memory import Shield, Tampered
from windtunnel.trust.shield.model import Region

CHUNK, SIZE = 256, 9216  # bytes of a chunk, and of each of two regions: 36 chunks, three blocks of versions
# memory, what it was before the last writes, bytes of a sealed chunk and of a region: what it is made into
ATTACKS: Mapping[str, Callable[[bytes, bytes, int, int], bytes]] = {
    "honest": lambda memory, before, chunk, region: memory,
    "data": lambda memory, before, chunk, region: memory[:20] + bytes([memory[20] ^ 1]) + memory[21:],
    "tag": lambda memory, before, chunk, region: (
        memory[: chunk - 1] + bytes([memory[chunk - 1] ^ 1]) + memory[chunk:]
    ),
    "zeros": lambda memory, before, chunk, region: bytes(chunk) + memory[chunk:],
    "chunks swapped": lambda memory, before, chunk, region: (
        memory[chunk : 2 * chunk] + memory[:chunk] + memory[2 * chunk :]
    ),
    "tags swapped": lambda memory, before, chunk, region: (
        memory[: chunk - 16] + memory[2 * chunk - 16 : 2 * chunk] + memory[chunk:]
    ),
    "regions swapped": lambda memory, before, chunk, region: memory[region:] + memory[:region],
    "replay": lambda memory, before, chunk, region: before[:chunk] + memory[chunk:],
    "rollback": lambda memory, before, chunk, region: before,
}


def attack(mode: str, folder: Path) -> dict[str, bool]:
    """By the name of each of `ATTACKS`, whether a shield of that mode detects it. Each strikes between two
    openings of a shield of its own, which wrote everything twice (its state lies in ``folder``). ``honest``:
    whether what nobody touched is as it was written. Raises UserError: there is no such mode."""
    regions, found = [Region(base, SIZE, CHUNK, mode) for base in (0, SIZE)], dict[str, bool]()
    for name, strike in ATTACKS.items():
        memory, state = bytearray(2 * regions[0].room), folder / f"{mode} {name}"
        shield = Shield(memory, regions, state)
        for content in (b"old", b"new"):
            before = bytes(memory)
            for region in regions:
                shield.write(region.base, content * (SIZE // 3))
        shield.save()
        memory[:] = strike(bytes(memory), before, regions[0].stride, regions[0].room)
        try:
            shield = Shield(memory, regions, state)
            read = {shield.read(region.base, SIZE) for region in regions}
            found[name] = name == "honest" and read == {b"new" * (SIZE // 3)}
        except Tampered:
            found[name] = name != "honest"
    return found
