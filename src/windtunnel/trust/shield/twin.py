"""What a shield costs an accelerator, in cycles of its clock.

AES engines encrypt, a MAC is over each chunk beside them, and the slower one is waited for. An access touches
whole chunks, a write to a part of one reads it first, and a tree's nodes are checked, by writes made anew.

Source: Zhao et al., ShEF (ASPLOS 2022), Shield; an engine's cycles are those of its public RTL
(stanford-mast/ShEF, hdk/src/lib/crypto): a block of AES-128 takes one to begin, one to end, and each round
the S-boxes' and one more; SHA-256 takes 66 for 64 bytes, and an HMAC has four blocks beside the data.
"""

from typing import NamedTuple

from windtunnel.trust.shield.model import Region

PORT = 64  # bytes a cycle without a shield


class Engines(NamedTuple):
    """``cores`` of AES, each with 4 or 16 ``sboxes``; ``mac``: pmac, with as many cores again, or hmac."""

    cores: int = 4
    sboxes: int = 16
    mac: str = "pmac"

    def aes(self, size: int) -> int:
        """Cycles for ``size`` bytes: a block takes 22 with 16 S-boxes, 52 with 4."""
        return -(-size // (16 * self.cores)) * (2 + 10 * (16 // self.sboxes + 1))

    def tag(self, size: int) -> int:
        return self.aes(size) + self.aes(1) if self.mac == "pmac" else 66 * (-(-size // 64) + 4)


class ShieldTraffic(NamedTuple):
    """``reads`` and ``writes`` of ``size`` bytes; ``random``: each in another chunk than the one before."""

    size: int
    reads: float
    writes: float = 0.0
    random: bool = False


def cycles(traffic: ShieldTraffic, region: Region, engines: Engines) -> float:
    """Of the engines, for all of ``traffic``."""
    chunks = traffic.size / region.chunk
    again = 2.0 if traffic.random and chunks < 1 else 1.0  # what is left of the chunk is read, too
    once = max(engines.aes(region.chunk), engines.tag(region.chunk))
    nodes = sum(engines.tag(size) for _, size in region.levels)
    touched = max(chunks, 1.0) if traffic.random else chunks
    return touched * (traffic.reads * (once + nodes) + traffic.writes * (again * once + 2 * nodes))


def overhead(compute: float, traffic: ShieldTraffic, region: Region, engines: Engines) -> float:
    """How much longer an accelerator takes that computes ``compute`` cycles beside its traffic; 0.0: none."""
    bare = traffic.size * (traffic.reads + traffic.writes) / PORT
    return (compute + max(bare, cycles(traffic, region, engines))) / (compute + bare) - 1.0
