"""What a shield is told of the memory behind it."""

from dataclasses import dataclass

from windtunnel.base.errors import UserError

MODES = ("mac", "versions", "tree")
TAG, VERSION, ARITY, DIGEST = 16, 8, 16, 32
"""Bytes of a tag and of a version; children of a node of the tree, bytes of a digest."""


@dataclass(frozen=True)
class Region:
    """Addresses ``base`` to ``base + length`` (bytes), sealed in chunks of ``chunk`` bytes.

    ``mode``: where the version of a chunk lies that makes an old one known. ``versions``: on chip, 8 bytes a
    chunk. ``tree``: behind the shield, below a tree of digests with its root on chip. ``mac``: beside the
    chunk; it is the negative control, which finds out what is changed, and not what is old."""

    base: int
    length: int
    chunk: int = 65536
    mode: str = "versions"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(f"region: mode {self.mode!r} is unknown; accepted are {', '.join(MODES)}")
        if min(self.chunk, self.length, self.base + 1) < 1 or self.length > self.chunk << 32:
            raise UserError(f"region: {self} is empty, or has more than 2^32 chunks")

    @property
    def chunks(self) -> int:
        return -(-self.length // self.chunk)

    @property
    def levels(self) -> list[tuple[int, int]]:
        """Of the tree, by level: nodes and their bytes. First blocks of 16 versions, then 16 digests each."""
        levels = [(-(-self.chunks // ARITY), VERSION * ARITY)] if self.mode == "tree" else []
        while levels and levels[-1][0] > 1:
            levels.append((-(-levels[-1][0] // ARITY), DIGEST * ARITY))
        return levels

    @property
    def stride(self) -> int:
        """Bytes behind the shield for a chunk."""
        return self.chunk + TAG + VERSION * (self.mode == "mac")

    @property
    def room(self) -> int:
        """Bytes behind the shield for all."""
        return self.chunks * self.stride + sum(count * size for count, size in self.levels)
