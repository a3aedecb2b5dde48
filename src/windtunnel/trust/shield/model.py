"""What a shield is told of the memory behind it."""

from __future__ import annotations

from dataclasses import dataclass

from windtunnel.base.errors import UserError

MODES = ("mac", "versions", "tree")
TAG, NONCE, ARITY, DIGEST = 16, 12, 16, 32
"""Bytes of a tag, a nonce that is stored, and a digest; children of a node of the tree."""


@dataclass(frozen=True)
class Region:
    """Addresses ``base`` to ``base + length`` (bytes), sealed in chunks of ``chunk`` bytes.

    ``mode``: where the version of a chunk lies that makes an old one known. ``versions``: on chip, 8 bytes a
    chunk. ``tree``: behind the shield, under a tree of digests whose root is on chip. ``mac``: nowhere. It is
    the negative control: what is changed is found out, what is old is not.
    """

    base: int
    length: int
    chunk: int = 65536
    mode: str = "versions"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(f"region: mode {self.mode!r} is unknown; accepted are {', '.join(MODES)}")
        if self.chunk < 1 or self.length < 1 or self.base < 0 or self.length > self.chunk << 32:
            raise UserError(f"region: {self} is empty, or has more than 2^32 chunks")

    @property
    def chunks(self) -> int:
        return -(-self.length // self.chunk)

    @property
    def levels(self) -> list[int]:
        """Nodes of the tree by level: blocks of versions first, then digests of 16 nodes each, up to one."""
        counts = [-(-self.chunks // ARITY)] if self.mode == "tree" else []
        while counts and counts[-1] > 1:
            counts.append(-(-counts[-1] // ARITY))
        return counts

    @property
    def stride(self) -> int:
        """Bytes behind the shield for a chunk."""
        return self.chunk + TAG + (NONCE if self.mode == "mac" else 0)

    @property
    def room(self) -> int:
        """Bytes behind the shield for all."""
        return self.chunks * self.stride + sum(count * node_size(k) for k, count in enumerate(self.levels))

    @property
    def on_chip(self) -> int:
        """Bytes on chip, but for the key."""
        return {"mac": 0, "versions": 8 * self.chunks, "tree": DIGEST}[self.mode]


def node_size(level: int) -> int:
    """Bytes of a node: 16 versions, or 16 digests."""
    return ARITY * (DIGEST if level else 8)
