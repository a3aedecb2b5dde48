"""The radix tree of a prefix cache: which KV ranges and states it holds, to the byte.

Each node is an edge of symbols: it holds their KV, and perhaps a state: that of all recurrent layers after
its last symbol. A model without states can use KV up to any symbol, one with states only up to a node that
has one. What changes is told as operations, in their order; who holds the tensors does the same with them. A
node that is in use is pinned: it stays, and so does all above it.

What may go is a leaf (its KV and its state), or the state alone of a node with one child, which then takes
over the node's KV. With several children a node is what requests share, and stays. Bytes never exceed the
capacity, not even within a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from windtunnel.serving.prefixcache import policy
from windtunnel.serving.prefixcache.policy import Decision, Lookup, Observation, Trials, changes
from windtunnel.serving.prefixcache.policy.changes import Change, Op, PrefixMatch
from windtunnel.serving.prefixcache.policy.density import Ages
from windtunnel.serving.prefixcache.policy.index import Index
from windtunnel.serving.prefixcache.policy.rules import CacheRules
from windtunnel.serving.prefixcache.policy.shapes import ModelShape
from windtunnel.serving.prefixcache.policy.tuner import ALPHAS, CacheReplay, Tuner

Symbols = NDArray[np.int64]
Log = Callable[[Observation, Decision], None]
D = TypeVar("D", bound=Decision)


@dataclass(eq=False, slots=True)
class PrefixNode:
    """``state``: whether it has one. ``tail``: it was the end of a request."""

    id: int
    parent: PrefixNode | None
    label: Symbols
    begin: int
    state: bool = False
    children: dict[int, PrefixNode] = field(default_factory=dict)
    used: float = 0.0
    uses: int = 0
    tail: bool = False
    pins: int = 0

    @property
    def end(self) -> int:
        return self.begin + len(self.label)


class PrefixCache:
    """A cache of ``capacity`` bytes for a model of ``shape``. ``unit``: tokens that a symbol stands for.
    ``decide`` decides, and ``log`` is told of each decision; times are seconds, on any one clock."""

    def __init__(
        self, shape: ModelShape, capacity: int, rules: CacheRules, *, unit: int = 1,
        decide: Callable[[Observation], Decision] = policy.decide, log: Log | None = None,
    ) -> None:  # fmt: skip
        self.shape, self.rules, self.unit = shape, rules, unit
        self.capacity, self.used = capacity, 0
        self.alpha = rules.alpha
        self.evictions = 0
        self._kv, self._state = unit * shape.kv, shape.state
        self._root = PrefixNode(0, None, np.empty(0, np.int64), 0)
        self._nodes: dict[int, PrefixNode] = {0: self._root}
        self._next = 1
        self._index = Index()
        self._decide, self._log = decide, log
        self._now = 0.0
        self._tuner = Tuner() if rules.tuned else None
        self._ages = Ages() if rules.order == "density" else None
        self._block = max(1, rules.block // unit)
        self._operations: list[Op] = []

    # what callers ask

    def look(
        self, symbols: ArrayLike, now: float, most: int | None = None, *, copies: int = policy.MANY,
        decoded: bool = True,
    ) -> PrefixMatch:  # fmt: skip
        """What of a prompt can be used, and which states its prefill is to copy.

        ``most``: symbols that may be used; by default all but the last token, whose logits must be computed.
        ``copies`` and ``decoded``: as of `Lookup`.
        """
        prompt = np.asarray(symbols, np.int64).reshape(-1)
        self._now = now
        if self._tuner is not None:
            self._tuner.on_lookup(prompt, now, most)
        if most is None:
            most = len(prompt) - 1 if self.unit == 1 else len(prompt)
        path, matched = self._walk(prompt)
        depth, node, reached = self._usable(path, min(matched, most))
        used = path[:reached]
        for passed in used if self.rules.touch == "path" else used[-1:]:
            if self._ages is not None:
                self._ages.note(self._group(passed), now - passed.used, True)
            passed.uses += 1
            self._touch(passed)
        keep = self._ask(
            Lookup(self.rules, self.unit, len(prompt), min(matched, most), depth, copies, decoded),
            policy.Retention,
        )
        depths, end = (keep.depths, keep.end) if self._state else ((), 0)
        return PrefixMatch(depth, node.id if node else 0, matched, depths, end)

    def admit(self, symbols: ArrayLike, copied: Sequence[int], now: float) -> Change:
        """Take in what a request has computed: KV of all ``symbols`` and states at the depths ``copied``.

        What there is no room for, or what could not be used, is left out; so are states that are there.
        """
        prompt = np.asarray(symbols, np.int64).reshape(-1)
        self._now = now
        if self.rules.empty:
            return ()
        grid = self._block if self.rules.paged else 1
        length = len(prompt) // grid * grid
        depths = sorted({depth for depth in copied if 0 < depth <= length and depth % grid == 0})
        if self._state:  # KV behind the last state could not be used
            length = depths[-1] if depths else 0
        path, matched, length, depths = self._room(prompt, length, depths if self._state else [])
        self._grow(path, matched, prompt[:length], depths, len(prompt))
        operations = self._changes()
        if self._tuner is not None:
            self._tuner.on_admit(self, prompt, copied, now)
        return operations

    def shrink(self, size: int, now: float) -> Change:
        """No more than ``size`` bytes stay, and what is in use."""
        self._now = now
        self._free(self.capacity - size)
        return self._changes()

    def pin(self, node: int) -> None:
        """The node is in use: it stays until it is unpinned as often."""
        self._pin(self._nodes[node], 1)

    def unpin(self, node: int) -> None:
        self._pin(self._nodes[node], -1)

    def due(self) -> CacheReplay | None:
        """The replay that the tuning of alpha now calls for, if any; `settle` takes what it gave."""
        return self._tuner.due() if self._tuner is not None else None

    def settle(self, saved: tuple[float, ...]) -> float:
        """The alpha that the policy takes for the rest, by what each of `ALPHAS` saved in a replay."""
        self.alpha = self._ask(Trials(ALPHAS, saved), policy.Alpha).alpha
        return self.alpha

    def clone(self) -> PrefixCache:
        """The same cache, to try something on it: unlogged, untuned and with nothing pinned."""
        rules = replace(self.rules, tuned=False)
        other = PrefixCache(self.shape, self.capacity, rules, unit=self.unit, decide=self._decide)
        other.used, other.alpha, other._next = self.used, self.alpha, self._next
        for node in sorted(self._nodes.values(), key=lambda node: node.begin):
            if node.parent is not None:
                twin = replace(node, parent=other._nodes[node.parent.id], children={}, pins=0)
                other._nodes[node.id] = other._nodes[node.parent.id].children[int(node.label[0])] = twin
        for twin in other._nodes.values():
            other._refresh(twin)
        return other

    # finding

    def _walk(self, symbols: Symbols) -> tuple[list[PrefixNode], int]:
        """The nodes that begin as ``symbols`` go on, the last perhaps in part, and how many symbols they
        share."""
        node, depth, path = self._root, 0, []
        while depth < len(symbols):
            child = node.children.get(int(symbols[depth]))
            if child is None:
                break
            depth += common(child.label, symbols[depth:])
            path.append(child)
            if depth < child.end:
                break
            node = child
        return path, depth

    def _usable(self, path: list[PrefixNode], most: int) -> tuple[int, PrefixNode | None, int]:
        """How deep ``path`` can be used, to ``most`` at most; the node that holds that, and the length of the
        path to it."""
        best: tuple[int, PrefixNode | None, int] = (0, None, 0)
        for place, node in enumerate(path, 1):
            if node.begin >= most:
                break
            if not self._state:
                best = (min(node.end, most), node, place)
            elif node.state and node.end <= most:
                best = (node.end, node, place)
        return best

    def _base(self, node: PrefixNode) -> int:
        """The depth from which it would have to be computed without this node."""
        if not self._state:
            return node.begin
        above = node.parent
        while above is not None and not above.state:
            above = above.parent
        return above.end if above is not None else 0

    # growing

    def _room(
        self, prompt: Symbols, length: int, depths: list[int]
    ) -> tuple[list[PrefixNode], int, int, list[int]]:
        """Make room for what is to be kept, or keep less: the path there is, how much of it matches, and the
        length and depths that there is room for."""
        while True:
            path, matched = self._walk(prompt[:length])
            if not length:
                return path, matched, length, []
            there = {node.end for node in path if node.state and node.end <= matched}
            depths = [depth for depth in depths if depth not in there]
            needed = (length - matched) * self._kv + len(depths) * self._state
            if needed <= max(0, self.capacity - self.used):
                return path, matched, length, depths
            with self._guarded(path[-1:]):
                freed = needed <= self.capacity and self._free(needed)
            if freed:
                continue  # states of the path may have gone
            over = max(1, needed - self.capacity)
            while self._state and depths and over > 0:
                last = depths.pop()
                over -= self._state + (last - max(depths[-1] if depths else 0, matched)) * self._kv
                length = depths[-1] if depths else 0
            if not self._state:
                length -= -(-max(over, needed - self.capacity + self.used) // self._kv)
                if length <= matched:
                    length = 0

    def _grow(
        self, path: list[PrefixNode], matched: int, prompt: Symbols, depths: list[int], whole: int
    ) -> None:
        """Nodes for the symbols of ``prompt`` beyond what matches, and states at ``depths``; ``whole``:
        symbols that the request had."""
        if path and matched < path[-1].end and len(prompt) > matched:
            path[-1] = self._split(path[-1], matched)
        for node in path if self.rules.touch == "path" else ():
            self._touch(node)
        if len(prompt) > matched:
            cuts = {*depths, len(prompt)}
            if self.rules.paged:
                cuts.update(range(matched // self._block * self._block, len(prompt), self._block))
            for end in sorted(cut for cut in cuts if cut > matched):
                path.append(self._make(path[-1] if path else self._root, prompt[matched:end]))
                matched = end
        elif path and len(prompt):
            self._touch(path[-1])
        place = 0
        for depth in depths:
            while path[place].end < depth:
                place += 1
            if depth < path[place].end:
                path.insert(place, self._split(path[place], depth))
            node = path[place]
            node.state, node.tail = True, depth == whole
            self.used += self._state
            self._operations.append(changes.Hold(node.id, depth))
            self._touch(node)
            self._below(node)

    def _make(self, parent: PrefixNode, label: Symbols) -> PrefixNode:
        node = PrefixNode(self._next, parent, label.copy(), parent.end)
        self._next += 1
        self._nodes[node.id] = parent.children[int(label[0])] = node
        self.used += len(label) * self._kv
        self._operations.append(changes.Make(node.id, parent.id, node.begin, node.end))
        self._touch(node)
        self._refresh(parent)
        return node

    def _split(self, node: PrefixNode, at: int) -> PrefixNode:
        """The part before depth ``at`` becomes a node of its own."""
        assert node.parent is not None
        first, rest = node.label[: at - node.begin], node.label[at - node.begin :]
        upper = PrefixNode(self._next, node.parent, first, node.begin, used=node.used)
        self._next += 1
        self._nodes[upper.id] = node.parent.children[int(first[0])] = upper
        upper.children[int(rest[0])] = node
        node.parent, node.label, node.begin = upper, rest, at
        self._operations.append(changes.Split(node.id, upper.id, at))
        self._refresh(upper)
        self._refresh(node)
        return upper

    # going

    def _free(self, needed: int) -> bool:
        """Whether there is room for so many bytes, after what has to go for it is gone."""
        while self.capacity - self.used < needed:
            if not self._index:
                return False
            node = self._nodes[self._victim()]
            self.evictions += 1
            if node.children:
                self._strip(node)
            else:
                self._remove(node)
        return True

    def _victim(self) -> int:
        eviction = self._index.eviction(self.rules, self.alpha, self._now, self._ages)
        node = self._nodes[self._ask(eviction, policy.Victim).node]
        if self._ages is not None:
            self._ages.note(self._group(node), self._now - node.used, False)
        return node.id

    def _strip(self, node: PrefixNode) -> None:
        self.used -= self._state
        node.state = False
        self._operations.append(changes.Strip(node.id))
        self._below(node)
        self._bare(node)

    def _remove(self, node: PrefixNode) -> None:
        """The node goes, and what above it is now of no use."""
        while True:
            parent = node.parent
            assert parent is not None
            del parent.children[int(node.label[0])]
            self.used -= self._own_bytes(node)
            self._forget(node)
            self._operations.append(changes.Evict(node.id))
            if not self._idle(parent) or parent.children:
                return self._bare(parent)
            node = parent

    def _idle(self, node: PrefixNode) -> bool:
        """Whether it holds KV for others only: of a model with states, without one of its own."""
        return bool(self._state) and not node.state and not node.pins and node.parent is not None

    def _bare(self, node: PrefixNode) -> None:
        """A node has lost a child or its state: without either it goes, with one child it is part of that."""
        if self._idle(node) and not node.children:
            return self._remove(node)
        if self._idle(node) and len(node.children) == 1 and not self.rules.paged:
            [child] = node.children.values()
            assert node.parent is not None
            child.label, child.begin = np.concatenate([node.label, child.label]), node.begin
            child.parent = node.parent
            child.parent.children[int(child.label[0])] = child
            self._forget(node)
            self._operations.append(changes.Merge(node.id, child.id))
            node = child
        self._refresh(node)

    def _forget(self, node: PrefixNode) -> None:
        del self._nodes[node.id]
        self._index.drop(node.id)

    # books

    def _touch(self, node: PrefixNode) -> None:
        node.used = self._now
        self._refresh(node)

    @contextmanager
    def _guarded(self, nodes: Sequence[PrefixNode]) -> Iterator[None]:
        """They stay while room is made."""
        for node in nodes:
            self._pin(node, 1)
        yield
        for node in nodes:
            self._pin(node, -1)

    def _pin(self, node: PrefixNode, count: int) -> None:
        node.pins += count
        self._refresh(node)

    def _own_bytes(self, node: PrefixNode) -> int:
        """Bytes that go with it."""
        return (0 if node.children else len(node.label) * self._kv) + (self._state if node.state else 0)

    def _refresh(self, node: PrefixNode) -> None:
        """Whether it may go, and what it is worth, as it is now."""
        may_go = not node.children or (node.state and len(node.children) < 2)
        if node.pins or node is self._root or not may_go:
            self._index.drop(node.id)
        else:
            self._index.put(node.id, node.used, self._worth(node), self._group(node))

    def _group(self, node: PrefixNode) -> int:
        """Nodes that live alike: by whether a request ended there, others went on from there, it was used."""
        return 4 * node.tail + 2 * bool(node.children) + bool(node.uses)

    def _worth(self, node: PrefixNode) -> float:
        if self.rules.order == "lru" or (self._state and not node.state):
            return 0.0
        base = self._base(node)
        if self.rules.order == "seglen":
            return float((node.end - base) * self.unit)
        saved = self.shape.flops(base * self.unit, node.end * self.unit)
        return saved / max(1, self._own_bytes(node))

    def _below(self, node: PrefixNode) -> None:
        """Those whose nearest state above has changed are worth something else now."""
        if self.rules.order == "lru" or not self._state:
            return
        queue = list(node.children.values())
        while queue:
            lower = queue.pop()
            self._refresh(lower)
            if not lower.state:
                queue += lower.children.values()

    def _ask(self, observation: Observation, kind: type[D]) -> D:
        decision = self._decide(observation)
        assert isinstance(decision, kind)
        if self._log is not None:
            self._log(observation, decision)
        return decision

    def _changes(self) -> Change:
        operations, self._operations = tuple(self._operations), []
        return operations


def common(first: Symbols, second: Symbols) -> int:
    """How many symbols both begin with."""
    size = min(len(first), len(second))
    if size == 0 or (first[size - 1] == second[size - 1] and np.array_equal(first[:size], second[:size])):
        return size
    return int(np.argmax(first[:size] != second[:size]))
