"""The prefix cache over real tensors: the policy's tree says what is kept, snapshots of the executor keep
it, and files what lies in the lower tier.

Every node in the first tier has a snapshot of all tokens up to its end. One without states is kept for its
keys and values: those of a node live as long as the node's own snapshot, or that of any node below it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from torch import Tensor

from windtunnel.base.errors import UserError
from windtunnel.serving.engine.live.adapter import States
from windtunnel.serving.engine.live.disk import Disk
from windtunnel.serving.engine.live.executor import Executor, Snapshot
from windtunnel.serving.engine.live.segments import Sequence as Stream
from windtunnel.serving.prefixcache.policy import MANY, POLICIES, changes, tree
from windtunnel.serving.prefixcache.policy.rules import RULES
from windtunnel.serving.prefixcache.policy.shapes import Shape, shape

Log = Callable[[str, str, object, object], None]
Note = Callable[..., object]


class Prefixes:
    """What ``executor`` has computed for earlier prompts, ``capacity`` bytes of it, by the rules of that
    name. What goes is put on ``disk``, ``room`` bytes of it, where reading it is faster than computing it
    anew at ``rate`` FLOP/s. What cannot be written makes that room as small as what is there; what cannot be
    read is forgotten: both are told once, and counted. ``note`` gets what became of each piece."""

    def __init__(
        self, executor: Executor, rules: str, capacity: int, log: Log | None = None, disk: Disk | None = None,
        room: int = 0, rate: float = 1e12, note: Note | None = None,
    ) -> None:  # fmt: skip
        if rules not in RULES:
            raise UserError(f"--prefix-cache: {rules!r} is unknown; accepted are {', '.join(RULES)}")
        if not executor.support.prefixes and not RULES[rules].empty:
            raise UserError(f"--prefix-cache: {executor.support.reason}")
        self.executor, self.disk, self._note = executor, disk, note
        lower = [changes.Tier("disk", room, disk.bandwidth, disk.latency, rate)] if disk else []
        self.tree = tree.PrefixCache(
            shape_of(executor), capacity, RULES[rules], tiers=lower, decide=POLICIES[rules],
            log=(lambda seen, made: log("serving.prefixcache", rules, seen, made)) if log else None,
        )  # fmt: skip
        self.unwritten = self.unread = 0
        """Pieces that did not get to the disk, and that did not come back from it as they were."""
        self._held: dict[int, Snapshot] = {}
        self._lost: list[tuple[int, str]] = []
        self._aside = ThreadPoolExecutor(1)  # where alphas are tried, while requests are served
        self._tuning: Future[tuple[float, ...]] | None = None

    def look(self, tokens: Sequence[int], now: float, copies: int = MANY) -> changes.Found:
        """What of a prompt is there, see `changes.Found`, brought back if it was away. It stays until
        `leave`. ``copies``: states that there is room for beside it."""
        self._forget_lost()
        # what was decoded is kept only where it gives the states that reading it gives
        decoded = self.executor.ready.limits is None
        found = self.tree.look(tokens, now, copies=copies, decoded=decoded)
        if found.away:
            there, change = self.tree.restore(found, now)
            self._do(change)
            if any((self._forget_lost(), self._bound(now), not there)):
                found = self.tree.look(tokens, now, near=True, copies=copies, decoded=decoded)
        if found.depth:
            self.tree.pin(found.node)
        return found

    def leave(self, found: changes.Found) -> None:
        """Who looked for it is done."""
        if found.depth:
            self.tree.unpin(found.node)

    def take(self, found: changes.Found, tokens: Sequence[int]) -> Stream:
        """A sequence that has read the first ``found.depth`` tokens."""
        if not found.depth:
            return self.executor.new()
        return self.executor.restore(self._held[found.node], tokens, found.depth)

    def put(self, tokens: Sequence[int], kept: Mapping[int, Snapshot], stream: Stream, now: float) -> None:
        """``stream`` has read ``tokens``; ``kept`` are snapshots by depth, which are freed."""
        self._forget_lost()
        self._do(self.tree.admit(tokens, list(kept), now), stream, kept)
        if self._tuning is not None and self._tuning.done():
            self.tree.settle(self._tuning.result())
            self._tuning = None
        elif self._tuning is None and (replay := self.tree.due()) is not None:
            self._tuning = self._aside.submit(replay.run)
        for left in kept.values():
            self.executor.free(left)
        self._bound(now)

    def facts(self) -> dict[str, float]:
        """What there is to tell: bytes and counts."""
        used, capacity = [*self.tree.used, 0], [*self.tree.capacity, 0]
        return {
            "prefix_bytes": self.executor.lasting,
            "prefix_disk_bytes": used[1], "prefix_disk_room": capacity[1],
            "prefix_disk_unwritten": self.unwritten, "prefix_disk_unread": self.unread,
        }  # fmt: skip

    def _bound(self, now: float) -> bool:
        """Whether more had to go, since tokens lie in slots of few sizes: the tree counts them alone."""
        gone = False
        while (over := self.executor.lasting - self.tree.capacity[0]) > 0:
            before = self.tree.used[0]
            self._do(self.tree.shrink(before - over, now))
            if self.tree.used[0] == before:  # the rest is in use
                break
            gone = True
        return gone

    def _do(
        self, change: changes.Change, stream: Stream | None = None, kept: Mapping[int, Snapshot] | None = None
    ) -> None:
        """What the tree says, with the tensors; ``stream`` has read what is new in it."""
        cut, held = self.executor.cut, self._held
        # with states nothing goes on from what is behind the last of them
        source = kept[max(kept)] if kept else stream
        for one in change:
            match one:
                case changes.Make(node, _, _, end):
                    assert source is not None
                    held[node] = cut(source, end)
                case changes.Split(node, upper, at) if node in held:
                    held[upper] = cut(held[node], at)
                case changes.Hold(node, depth):
                    assert kept is not None
                    self._states(node, kept[depth].states)
                case changes.Strip(node):
                    self._drop(node, "state")
                case changes.Evict(node):
                    self._drop(node, "state")
                    self._drop(node, "kv")
                case changes.Merge(gone):
                    self._drop(gone, "kv")
                case changes.Move(node, what, 0, parent, end):
                    if what == "kv" and source is not None and end <= source.depth:
                        self._drop(node, "kv")
                        held[node] = cut(source, end)
                    else:
                        self._read(node, what, parent, end)
                case changes.Move(node, what, _, parent):
                    self._write(node, what, parent)
        if self._note is not None and change:
            self._note("prefixes", pieces=[self._piece(one) for one in change])

    def _piece(self, one: changes.Op) -> dict[str, Any]:
        """Of a node what was to happen, and whether its keys and values, and its state, are in memory now."""
        node = one.gone if isinstance(one, changes.Merge) else one.node
        held = self._held.get(node)
        do = f"{one.what} to {one.tier}" if isinstance(one, changes.Move) else type(one).__name__.lower()
        state = held is not None and bool(held.states)
        return {"do": do, "node": node, "kv": held is not None, "state": state}

    def _write(self, node: int, what: str, parent: int) -> None:
        """From memory to the disk."""
        if node not in self._held or self.disk is None:
            return  # it was lost before
        begin = self._held[parent].depth if parent else 0
        if not self.disk.put((node, what), self.executor.export(self._held[node], begin)):
            self._lost.append((node, what))
            self._wrong("unwritten", "it is too slow for all that would be put there")
        self._release(node, what)

    def _read(self, node: int, what: str, parent: int, end: int) -> None:
        """From the disk to memory."""
        assert self.disk is not None
        try:
            tensors, held = self.disk.take((node, what)), self._held.get(parent)
            if parent and held is None:
                raise KeyError(parent)
            back = self.executor.adopt(_last(tensors, end - (held.depth if held else 0)), held)
        except KeyError:
            self._lost.append((node, what))  # with what it goes on from
        except (OSError, ValueError) as error:
            self._lost.append((node, what))
            self._wrong("unread", str(error))
        else:
            if node in self._held:
                self.executor.free(self._held[node])
            self._held[node] = back

    def _drop(self, node: int, what: str) -> None:
        """It is gone, wherever it was."""
        if self.disk is not None and (node, what) in self.disk:
            self.disk.drop((node, what))
        else:
            self._release(node, what)

    def _release(self, node: int, what: str) -> None:
        """It is in memory no more."""
        if what == "state":
            self._states(node, {})
        elif (gone := self._held.pop(node, None)) is not None:
            self.executor.free(gone)

    def _states(self, node: int, states: States) -> None:
        """These are those at the node's end."""
        before = self._held.get(node)
        if before is not None and (before.states or states):
            self._held[node] = self.executor.cut(before, before.depth, states)
            self.executor.free(before)

    def _forget_lost(self) -> bool:
        """Whether there was anything to forget."""
        failed = self.disk.failed() if self.disk is not None else []
        for key, why in failed:
            self._lost.append(key)
            self._wrong("unwritten", f"{why}; it is used as far as it goes")
        lost, self._lost = self._lost, []
        for node, what in lost:
            self._do(self.tree.lose(node, what))
        if failed:
            self.tree.capacity = (self.tree.capacity[0], self.tree.used[1])
        return bool(lost)

    def _wrong(self, count: str, why: str) -> None:
        setattr(self, count, getattr(self, count) + 1)
        if getattr(self, count) == 1 and self.disk is not None:
            print(f"windtunnel serve: --prefix-disk {self.disk.folder}: {why}", file=sys.stderr, flush=True)


def _last(tensors: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """An `Executor.export` of the last ``count`` tokens of what was exported: the rest went to another node
    when it lay on the disk."""
    return {
        name: held[:, held.shape[1] - count :] if name[:2] in ("k.", "v.") else held[len(held) - count :]
        if name == "tokens" else held
        for name, held in tensors.items()
    }  # fmt: skip


def shape_of(executor: Executor) -> Shape:
    """Bytes as the executor's tensors have them, FLOPs by the model's config; by its parameters alone where
    that has layers whose FLOPs are not counted."""
    try:
        found = shape(executor.ready.config.to_dict())
    except UserError:
        found = Shape(0, 0, 2.0 * sum(each.numel() for each in executor.ready.model.parameters()))
    return replace(found, kv=executor.token_bytes, state=executor.state_bytes)
