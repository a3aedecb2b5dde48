"""Going on from the newest state that all ranks can have.

All ranks say what their hosts' memory holds (and one what storage holds), and all plan alike from the same
lists (`policy.restore`). Each fetches and verifies what it needs into scratch memory, then all say how it
went. If anybody could not get a shard from any source, the bad copies are struck from the lists and all plan
again: another source, then an older step. Nothing is written into the program's tensors before all have all
they need for the same step, so all ranks always end at one step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from windtunnel.base.errors import LessError, UserError
from windtunnel.base.plain import from_plain, to_plain
from windtunnel.store import eventlog
from windtunnel.store.objects.files import ObjectError
from windtunnel.training.checkpoint.live import snapshot, state
from windtunnel.training.checkpoint.live.layout import (
    Move,
    ShardLayout,
    TensorEntry,
    Want,
    choose_moves,
    copy_overlap,
    digest,
    room_for,
    view_of,
)
from windtunnel.training.checkpoint.live.slot import CopyError
from windtunnel.training.checkpoint.model import SHARED, Copy, RestorePlan, Shard
from windtunnel.training.checkpoint.policy import Inventory, decide
from windtunnel.training.checkpoint.policy.restore import BadCopy, local_first
from windtunnel.training.elastic.determinism import seed_for

if TYPE_CHECKING:
    from windtunnel.training.checkpoint.live.access import Stored

_TIERS = ("memory", "peer", "storage")


@dataclass(frozen=True)
class LoadedShard:
    """A ``shard`` as it was saved, with its ``data`` and the blob of its ``layout``; its generation is the
    newest that a shard of the step is of. ``at_home``: this host's memory has this very copy."""

    shard: Shard
    data: memoryview
    layout: bytes
    at_home: bool

    @property
    def name(self) -> str:
        return self.shard.name


@dataclass(frozen=True)
class Restored:
    """What was gone on from. ``shards``: those that this rank saves, as they were; None from a job of another
    size, which had others. ``store``: as in the plan."""

    step: int
    shards: tuple[LoadedShard, ...] | None
    store: bool


class _Missing(Exception):
    """No source of a shard gave it."""


def _inventory(job: Any, reader: Stored, key: str, restart: bool) -> tuple[Inventory, int, str]:
    """What there is to go on from, the seed of the run as rank 0 has it, and why storage could not be read
    ("": it was): alike on all ranks."""
    report: dict[str, Any] = {"copies": to_plain(reader.copies()) if job.local_rank == 0 else []}
    if job.rank == 0:
        report |= {"stored": [], "log": job.checkpoints(), "seed": torch.initial_seed(), "unread": ""}
        try:
            report["stored"] = to_plain(reader.stored())
        except ObjectError as error:
            report["unread"] = f"storage cannot be read: {error}"
    reports = job.agree(f"inventory/{key}", report)
    first = reports[0]
    copies = [copy for rank in sorted(reports) for copy in reports[rank]["copies"]]
    there = {"copies": copies, "stored": first["stored"], "log": first["log"], "restart": restart}
    there["unread"] = bool(first["unread"])
    return from_plain(Inventory, there), int(first["seed"]), str(first["unread"])


def restore(
    job: Any,
    reader: Stored,
    program: state.State,
    *,
    key: str,
    rng: bool = True,
    restart: bool = False,
    patience: float,
) -> Restored | None:
    """Put the newest restorable state into ``program``; None if there is none, and nothing was changed.

    All ranks call it. ``key`` makes its agreements distinct within a generation. ``restart``: whether the job
    may begin anew though it had a committed step once. ``patience``: seconds to wait for ranks that load
    longer, from storage perhaps.

    Raises:
        LessError: it had one, nothing of it can be restored, and it may not; all ranks raise.
        ObjectError: storage cannot be read, and memory has not what may be there; all ranks raise.
        UserError: what was saved does not fit ``program``; all ranks raise.
        MembershipChanged, TimeoutError: from the agreements.
    """
    begin = time.monotonic()
    there, seed, unread = _inventory(job, reader, key, restart)
    bad: frozenset[BadCopy] = frozenset()
    reason = ""
    for attempt in range(len(there.copies) + sum(len(step.shards) for step in there.stored) + 2):
        inventory = replace(there, bad=tuple(_sorted(bad)))
        plan = decide(inventory)
        assert isinstance(plan, RestorePlan)
        reason = plan.reason
        if job.rank == 0:  # all decide alike
            job.event("decision", **eventlog.decided("training.checkpoint", "newest", inventory, plan))
            if plan.ignored and not attempt:
                job.event("note", text=f"not restored: {'; '.join(plan.ignored)}")
        if plan.unread:
            raise ObjectError(unread)
        if job.rank == 0 and unread and not attempt:
            job.event("note", text=f"{unread}; memory has what is needed")
        if plan.failed:
            raise LessError(f"{plan.failed}; --on-no-checkpoint restart begins at step 0")
        if plan.step is None:
            if job.rank == 0 and (there.copies or there.stored or job.generation > 1):
                job.event("note", text=f"{plan.reason}; the job begins at the beginning")
            return None
        load = _Load(job, reader, program, plan, rng, seed)
        loaded, error = False, None
        job.at("restoring", plan.step)
        try:
            load.run()
            loaded = True
        except UserError as refused:
            error = str(refused)
        except _Missing:
            pass
        report = {
            "bad": [[b.place, b.shard, b.step] for b in load.bad],
            "loaded": loaded,
            "error": error,
        }
        reports = job.agree(f"loaded/{key}.{attempt}", report, patience)
        bad |= {BadCopy(*copy) for rank in reports for copy in reports[rank]["bad"]}
        refusals = [(rank, reports[rank]["error"]) for rank in sorted(reports) if reports[rank]["error"]]
        if refusals:
            raise UserError(f"rank {refusals[0][0]}: {refusals[0][1]}")
        if all(reports[rank]["loaded"] for rank in reports):
            break
    else:
        raise RuntimeError(f"a restore failed again and again: {reason}")
    if bad:
        names = ", ".join(f"{b.shard or 'all'} of step {b.step} at {_holder(b.place)}" for b in _sorted(bad))
        if job.rank == 0:
            job.event("note", text=f"bad copies were passed over: {names}")
    load.put()
    seconds = time.monotonic() - begin
    how = {"tier": load.tier, "seconds": seconds, "reason": plan.reason}
    job.event("restored", step=plan.step, read=load.read, **how)
    return Restored(plan.step, load.shards, plan.store)


class _Load:
    """One attempt of one rank to get all that it needs for one step, into scratch memory. ``shards``: as of
    `Restored`; ``tier``: the farthest that something was read from; ``read``: where each shard was."""

    def __init__(
        self,
        job: Any,
        reader: Stored,
        program: state.State,
        plan: RestorePlan,
        rng: bool,
        seed: int,
    ) -> None:
        assert plan.step is not None
        self.bad: list[BadCopy] = []
        self._job, self._reader, self._program, self._rng = job, reader, program, rng
        self._seed = seed
        self._step, self._world = plan.step, plan.world
        self._sources = {row[0].shard.name: local_first(row, job.place) for row in plan.sources}
        # Copies of several courses may serve if they agree, but that is seen only while they overlap.
        self._course = max(copy.shard.generation for row in plan.sources for copy in row)
        self._layouts: dict[str, ShardLayout] = {}
        self._blobs: dict[str, bytes] = {}
        self._loaded: dict[str, LoadedShard] = {}
        self._pieces: dict[str, torch.Tensor] = {}
        self._wholes: dict[str, tuple[int, ...]] = {}
        self._others: dict[str, Any] = {}
        self.shards: tuple[LoadedShard, ...] | None = None
        self.tier = "memory"
        self.read: dict[str, int | None] = {}

    def run(self) -> None:
        """Raises:
        UserError: it does not fit.
        _Missing: a shard could not be had; ``bad`` says what was tried.
        """
        rank = self._job.rank
        primary = f"rank{rank % self._world}"
        near = [primary, *([SHARED] if SHARED in self._sources else [])]
        far = [shard for shard in self._sources if shard not in near]
        for shard in near:
            self._layout(shard)
        try:
            if self._world != self._job.world:
                raise UserError("another world")  # what other ranks hold is needed for sure
            wants, moves = self._choose(near)
        except UserError:
            for shard in far:
                self._layout(shard)
            wants, moves = self._choose([*near, *far])
        # A rank may have nothing of a tensor: no shard has that to give.
        self._pieces = {w.name: room_for(w) for w in wants if w.start is not None and not math.prod(w.shape)}
        for shard, owed in self._objects([*near, *far], moves, primary):
            data = self._fetch(shard)
            layout = self._layouts[shard]
            if owed:
                objects = snapshot.get_objects(layout, data)
                self._others.update({name: objects[name] for name in owed if name in objects})
            self._take(moves.get(shard, []), data)
        if self._world == self._job.world:
            mine = [shard for shard in near if shard in (f"rank{rank}", SHARED)]
            for shard in mine:
                if shard not in self._loaded:
                    self._fetch(shard)
            self.shards = tuple(self._loaded[shard] for shard in mine)

    def put(self) -> None:
        """What was got, into the program."""
        rank = self._job.rank
        # the generators of the rank whose shard is read go on there, not in this one as well
        reseed = seed_for(self._seed, rank, self._step) if rank >= self._world else None
        pieces, wholes = self._pieces.__getitem__, self._wholes.__getitem__
        state.put(self._program, pieces, wholes, self._others, rng=self._rng, reseed=reseed)

    def _choose(self, shards: Sequence[str]) -> tuple[list[Want], dict[str, list[Move]]]:
        """What the state wants, and the moves that give it, by shard."""
        layouts = [self._layouts[shard] for shard in shards if shard in self._layouts]
        saved: dict[str, TensorEntry] = {}
        for layout in layouts:
            for entry in layout.entries:
                saved.setdefault(entry.name, entry)
        names = {name for layout in layouts for name in layout.objects}
        wants = state.wants(self._program, saved, names, self._rng)
        self._wholes = {name: entry.whole for name, entry in saved.items()}
        return wants, choose_moves(layouts, wants)

    def _objects(
        self, shards: Sequence[str], moves: dict[str, list[Move]], primary: str
    ) -> list[tuple[str, list[str]]]:
        """Shards to fetch, and the objects to take from each: a name comes from the first that has it."""
        planned: set[str] = set()
        out = []
        for shard in shards:
            if shard not in self._layouts:
                continue
            owed = [name for name in self._layouts[shard].objects if name not in planned]
            planned.update(owed)
            if shard != primary:
                owed = state.needed_objects(self._program, owed)
            if owed or shard in moves:
                out.append((shard, owed))
        return out

    def _take(self, moves: Sequence[Move], data: memoryview) -> None:
        pieces = self._pieces
        inside = sum(move.source.nbytes for move in moves)
        for move in moves:
            source = view_of(data, move.source)
            # A shard that is wanted for its greater part is kept as it came; of others pieces are copied.
            if move.overlap is None and 2 * inside >= len(data):
                pieces[move.want.name] = source
                continue
            if move.want.start is None or move.overlap is None:
                pieces[move.want.name] = source.clone()
                continue
            if move.want.name not in pieces:
                pieces[move.want.name] = room_for(move.want)
            copy_overlap(move, source, pieces[move.want.name])

    def _layout(self, name: str) -> None:
        for copy in list(self._sources.get(name, [])):
            try:
                blob = self._reader.layout(copy)
            except CopyError:
                blob = b""
            if digest(blob) != copy.shard.layout:
                self._strike(copy)
                continue
            layout = ShardLayout.of(blob)
            if layout.nbytes != copy.shard.nbytes:
                raise UserError(
                    f"checkpoint of step {self._step}: shard {name} has {copy.shard.nbytes} bytes, its "
                    f"layout says {layout.nbytes}"
                )
            self._layouts[name], self._blobs[name] = layout, blob
            return
        raise _Missing(name)

    def _fetch(self, name: str) -> memoryview:
        for copy in list(self._sources[name]):
            data = memoryview(np.empty(copy.shard.nbytes, np.uint8)).cast("B")  # type: ignore[arg-type]
            try:
                checksum = self._reader.fetch(copy, data)
            except CopyError:
                checksum = ""
            if checksum != copy.shard.checksum:
                self._strike(copy)
                continue
            at_home = copy.place == self._job.place
            tier = "storage" if copy.place is None else "memory" if at_home else "peer"
            self.tier = max(self.tier, tier, key=_TIERS.index)
            self.read[name] = copy.place
            if name in (f"rank{self._job.rank}", SHARED):
                shard = replace(copy.shard, generation=self._course)
                self._loaded[name] = LoadedShard(shard, data, self._blobs[name], at_home)
            return data
        raise _Missing(name)

    def _strike(self, copy: Copy) -> None:
        self.bad.append(BadCopy(copy.place, copy.shard.name, self._step))
        self._sources[copy.shard.name].remove(copy)


def _holder(place: int | None) -> str:
    return "storage" if place is None else f"place {place}"


def _sorted(bad: frozenset[BadCopy]) -> list[BadCopy]:
    return sorted(bad, key=lambda b: (-b.step, b.shard, math.inf if b.place is None else b.place))
