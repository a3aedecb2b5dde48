"""The prefix cache over real tensors: the policy's tree says what is kept, snapshots of the executor keep
it.

A model with states has a snapshot at each node that holds one; KV lives as long as any snapshot reads it. A
model without states has one at each node, since it can be used up to any token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from windtunnel.base.errors import UserError
from windtunnel.serving.engine.live.executor import Executor, Snapshot
from windtunnel.serving.engine.live.executor import Sequence as Stream
from windtunnel.serving.prefixcache.policy import POLICIES, changes, tree
from windtunnel.serving.prefixcache.policy.rules import RULES
from windtunnel.serving.prefixcache.policy.shapes import Shape, shape

Log = Callable[[str, str, object, object], None]


class Prefixes:
    """What ``executor`` has computed for earlier prompts, ``capacity`` bytes of it, by the rules of that
    name."""

    def __init__(self, executor: Executor, rules: str, capacity: int, log: Log | None = None) -> None:
        if rules not in RULES:
            raise UserError(f"--prefix-cache: {rules!r} is unknown; accepted are {', '.join(RULES)}")
        if not executor.support.prefixes and not RULES[rules].empty:
            raise UserError(f"--prefix-cache: {executor.support.reason}")
        self.executor = executor
        self.tree = tree.PrefixCache(
            shape_of(executor), capacity, RULES[rules], decide=POLICIES[rules],
            log=(lambda seen, made: log("serving.prefixcache", rules, seen, made)) if log else None,
        )  # fmt: skip
        self._held: dict[int, Snapshot] = {}
        self._aside = ThreadPoolExecutor(1)  # where alphas are tried, while requests are served
        self._tuning: Future[tuple[float, ...]] | None = None

    def look(self, tokens: Sequence[int], now: float) -> changes.Found:
        """What of a prompt is there; see `changes.Found`."""
        return self.tree.look(tokens, now)

    def take(self, found: changes.Found, tokens: Sequence[int]) -> Stream:
        """A sequence that has read the first ``found.depth`` tokens; the node stays until `leave`."""
        if not found.depth:
            return self.executor.new()
        self.tree.pin(found.node)
        return self.executor.restore(self._held[found.node], tokens, found.depth)

    def leave(self, found: changes.Found) -> None:
        """Who took it is done."""
        if found.depth:
            self.tree.unpin(found.node)

    def put(self, tokens: Sequence[int], kept: dict[int, Snapshot], stream: Stream, now: float) -> None:
        """``stream`` has read ``tokens``; ``kept`` are snapshots by depth, which are the cache's from now
        on."""
        whole = None
        for change in self.tree.admit(tokens, list(kept), now):
            match change:
                case changes.Make(node, _, _, end) if not self.executor.state_bytes:
                    whole = whole or self.executor.snapshot(stream)
                    self._held[node] = self._cut(whole, tokens, end)
                case changes.Split(node, upper, at) if not self.executor.state_bytes:
                    self._held[upper] = self._cut(self._held[node], _tokens(self._held[node]), at)
                case changes.Hold(node, depth):
                    self._held[node] = kept.pop(depth)
                case changes.Evict(node) | changes.Strip(node) | changes.Merge(node, _):
                    if (gone := self._held.pop(node, None)) is not None:
                        self.executor.free(gone)
        if self._tuning is not None and self._tuning.done():
            self.tree.settle(self._tuning.result())
            self._tuning = None
        elif self._tuning is None and (replay := self.tree.due()) is not None:
            self._tuning = self._aside.submit(replay.run)
        for left in (*kept.values(), *((whole,) if whole else ())):
            self.executor.free(left)

    def _cut(self, snapshot: Snapshot, tokens: Sequence[int], depth: int) -> Snapshot:
        """Its first ``depth`` tokens."""
        stream = self.executor.restore(snapshot, tokens, depth)
        made = self.executor.snapshot(stream)
        self.executor.free(stream)
        return made


def _tokens(snapshot: Snapshot) -> list[int]:
    return [token for piece, length in snapshot.path for token in piece.tokens[:length]]


def shape_of(executor: Executor) -> Shape:
    """Bytes as the executor's tensors have them, FLOPs by the model's config; by its parameters alone where
    that has layers whose FLOPs are not counted."""
    try:
        found = shape(executor.ready.config.to_dict())
    except UserError:
        found = Shape(0, 0, 2.0 * sum(each.numel() for each in executor.ready.model.parameters()))
    return replace(found, kv=executor.token_bytes, state=executor.state_bytes)
