"""The prefix cache over real tensors: the policy's tree says what is kept, and snapshots of the executor keep
it.

Every node has a snapshot of all tokens up to its end. One without states is kept for its
keys and values: those of a node live as long as the node's own snapshot, or that of any node below it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from windtunnel.base.errors import UserError
from windtunnel.serving.engine.live.adapter import States
from windtunnel.serving.engine.live.executor import Executor, Snapshot
from windtunnel.serving.engine.live.segments import Sequence as Stream
from windtunnel.serving.engine.policies import Note, unheard
from windtunnel.serving.engine.policy.scheduler import Log
from windtunnel.serving.prefixcache.policy import MANY, POLICIES, changes, tree
from windtunnel.serving.prefixcache.policy.rules import RULES
from windtunnel.serving.prefixcache.policy.shapes import ModelShape, shape


class Prefixes:
    """What ``executor`` has computed for earlier prompts, ``capacity`` bytes of it, by the rules of that
    name. ``note`` gets what became of each piece."""

    def __init__(
        self, executor: Executor, rules: str, capacity: int, log: Log | None = None, note: Note | None = None
    ) -> None:
        self.executor, self._note = executor, note or unheard
        self.tree = tree.PrefixCache(
            shape_of(executor), capacity, RULES[rules], decide=POLICIES[rules],
            log=partial(log, "serving.prefixcache", rules) if log else None,
        )  # fmt: skip
        self._snapshots: dict[int, Snapshot] = {}
        self._aside = ThreadPoolExecutor(1)  # where alphas are tried, while requests are served
        self._tuning: Future[tuple[float, ...]] | None = None

    def look(self, tokens: Sequence[int], now: float, copies: int = MANY) -> changes.PrefixMatch:
        """What of a prompt is there, see `changes.PrefixMatch`. It stays until `leave`. ``copies``: states
        that there is room for beside it."""
        # what was decoded is kept only where it gives the states that reading it gives
        decoded = self.executor.ready.limits is None
        match = self.tree.look(tokens, now, copies=copies, decoded=decoded)
        if match.depth:
            self.tree.pin(match.node)
        return match

    def leave(self, match: changes.PrefixMatch) -> None:
        """Who looked for it is done."""
        if match.depth:
            self.tree.unpin(match.node)

    def take(self, match: changes.PrefixMatch) -> Stream:
        """A sequence that has read the first ``match.depth`` tokens."""
        if not match.depth:
            return self.executor.new()
        return self.executor.restore(self._snapshots[match.node], match.depth)

    def put(
        self, tokens: Sequence[int], snapshots: Mapping[int, Snapshot], stream: Stream, now: float
    ) -> None:
        """``stream`` has read ``tokens``; ``snapshots`` by depth, which are freed."""
        self._do(self.tree.admit(tokens, list(snapshots), now), stream, snapshots)
        if self._tuning is not None and self._tuning.done():
            self.tree.settle(self._tuning.result())
            self._tuning = None
        elif self._tuning is None and (replay := self.tree.due()) is not None:
            self._tuning = self._aside.submit(replay.run)
        for left in snapshots.values():
            self.executor.free(left)
        self._bound(now)

    def _bound(self, now: float) -> None:
        """More may have to go, since tokens lie in slots of few sizes: the tree counts them alone."""
        while (over := self.executor.held(self._snapshots.values()) - self.tree.capacity) > 0:
            before = self.tree.used
            self._do(self.tree.shrink(before - over, now))
            if self.tree.used == before:  # the rest is in use
                break

    def _do(
        self,
        change: changes.Change,
        stream: Stream | None = None,
        snapshots: Mapping[int, Snapshot] | None = None,
    ) -> None:
        """What the tree says, with the tensors; ``stream`` has read what is new in it."""
        cut, nodes = self.executor.cut, self._snapshots
        # with states nothing goes on from what is behind the last of them
        source = snapshots[max(snapshots)] if snapshots else stream
        for action in change:
            match action:
                case changes.Make(node, _, _, end):
                    assert source is not None
                    nodes[node] = cut(source, end)
                case changes.Split(node, upper, at):
                    nodes[upper] = cut(nodes[node], at)
                case changes.Hold(node, depth):
                    assert snapshots is not None
                    self._states(node, snapshots[depth].states)
                case changes.Strip(node):
                    self._states(node, {})
                case changes.Evict(node) | changes.Merge(node, _):
                    self.executor.free(nodes.pop(node))
        if change:
            self._note("prefixes", pieces=[self._piece(action) for action in change])

    def _piece(self, op: changes.Op) -> dict[str, Any]:
        """Of a node what was to happen, and whether its keys and values, and its state, are in memory now."""
        node = op.node
        snapshot = self._snapshots.get(node)
        state = snapshot is not None and bool(snapshot.states)
        return {"do": type(op).__name__.lower(), "node": node, "kv": snapshot is not None, "state": state}

    def _states(self, node: int, states: States) -> None:
        """These are those at the node's end."""
        before = self._snapshots[node]
        self._snapshots[node] = self.executor.cut(before, before.depth, states)
        self.executor.free(before)


def shape_of(executor: Executor) -> ModelShape:
    """Bytes as the executor's tensors have them, FLOPs by the model's config; by its parameters alone where
    that has layers whose FLOPs are not counted."""
    try:
        form = shape(executor.ready.config.to_dict())
    except UserError:
        form = ModelShape(0, 0, 2.0 * executor.ready.parameters)
    return replace(form, kv=executor.token_bytes, state=executor.state_bytes)
