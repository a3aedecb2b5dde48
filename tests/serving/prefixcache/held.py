"""What holds the tensors, in small: it does what the tree says, and knows what every node's KV really is."""

from __future__ import annotations

from dataclasses import dataclass, field

from windtunnel.serving.prefixcache.policy.changes import (
    Change,
    Evict,
    Hold,
    Make,
    Merge,
    PrefixMatch,
    Split,
    Strip,
)  # fmt: skip
from windtunnel.serving.prefixcache.policy.index import Index
from windtunnel.serving.prefixcache.policy.tree import PrefixCache

Prefix = tuple[int, ...]


@dataclass
class Piece:
    """KV of some symbols, each with all symbols before it; ``state``: of which prefix it is one."""

    parent: int
    kv: list[Prefix]
    state: Prefix | None = None


@dataclass
class Held:
    """Pieces by node. Each operation is checked when it is done."""

    cache: PrefixCache
    pieces: dict[int, Piece] = field(default_factory=dict)

    def do(self, change: Change, symbols: Prefix = (), copied: frozenset[int] = frozenset()) -> None:
        prefixes = [symbols[:end] for end in range(1, len(symbols) + 1)]
        for operation in change:
            match operation:
                case Make(node, parent, begin, end):
                    assert node not in self.pieces and 0 <= begin < end
                    assert parent == 0 or self.pieces[parent].kv[-1] == symbols[:begin]
                    assert parent or begin == 0
                    self.pieces[node] = Piece(parent, prefixes[begin:end])
                case Split(node, upper, at):
                    piece = self.pieces[node]
                    cut = at - len(piece.kv[0]) + 1
                    assert 0 < cut < len(piece.kv)
                    self.pieces[upper] = Piece(piece.parent, piece.kv[:cut])
                    piece.parent, piece.kv = upper, piece.kv[cut:]
                case Hold(node, depth):
                    assert self.pieces[node].state is None and depth in copied
                    self.pieces[node].state = symbols[:depth]
                case Merge(gone, into):
                    upper = self.pieces.pop(gone)
                    lower = self.pieces[into]
                    assert upper.state is None and lower.parent == gone
                    assert all(piece.parent != gone for name, piece in self.pieces.items() if name != into)
                    lower.kv, lower.parent = upper.kv + lower.kv, upper.parent
                case Evict(node):
                    del self.pieces[node]
                case Strip(node):
                    assert self.pieces[node].state is not None
                    self.pieces[node].state = None
        self.check()

    def check(self) -> None:
        """No KV without what is before it; every state where it was copied; bytes as the tree says."""
        taken = 0
        for piece in self.pieces.values():
            before = piece.kv[0][:-1]
            assert before == (self.pieces[piece.parent].kv[-1] if piece.parent else ())
            assert piece.state is None or piece.state == piece.kv[-1]
            taken += len(piece.kv) * self.cache.unit * self.cache.shape.kv
            if piece.state is not None:
                taken += self.cache.shape.state
        assert taken == self.cache.used and len(self.pieces) == len(self.cache._nodes) - 1
        assert taken <= self.cache.capacity
        known = rows(self.cache._index)
        for node in self.cache._nodes.values():
            self.cache._refresh(node)
        assert known == rows(self.cache._index), "what may go is not as it is known"

    def usable(self, prompt: Prefix, most: int) -> int:
        """By hand: the deepest prefix of ``prompt`` that can be used."""
        held = {prefix for piece in self.pieces.values() for prefix in piece.kv}
        states = {piece.state for piece in self.pieces.values()}
        depths = [depth for depth in range(1, most + 1) if prompt[:depth] in held]
        if self.cache.shape.state:
            depths = [depth for depth in depths if prompt[:depth] in states]
        return max(depths, default=0)

    def used(self, match: PrefixMatch, prompt: Prefix) -> None:
        """What was found is what it is said to be."""
        path, node = list[int](), match.node
        while node:
            path.insert(0, node)
            node = self.pieces[node].parent
        kv = [prefix for node in path for prefix in self.pieces[node].kv][: match.depth]
        assert kv == [prompt[:end] for end in range(1, match.depth + 1)]
        if self.cache.shape.state and match.depth:
            assert self.pieces[match.node].state == prompt[: match.depth]


def rows(index: Index) -> dict[int, tuple[float, ...]]:
    return {int(node): columns for node, *columns in zip(*index.columns(), strict=True)}
