"""Which step a job goes on from, and where each shard of it is read.

The newest step wins of which every shard has a copy that is not known to be bad, in the memory of some
host or in storage. Copies of one step may be of different *courses*: the job went back and did the step
again, in a newer generation. Such copies are mixed only if the courses are the same in what they made: both
have a copy of some shard, and all shards of which both have one agree in checksum. (Training is synchronous:
one shard equal bit for bit does not come from another state.) Else the newest generation goes first.

Within one generation two copies of a rank's shard that disagree cannot both be right, though each fits its
own checksum: the majority is believed, and without one none. State that all ranks hold alike (``"shared"``)
may differ in the last bits between them: without a majority the lowest place's is taken.

Where the supervisor keeps a log, it is the authority: a step that it does not call committed (in storage:
written by this run) is never restored, however new and whole it is. So nobody who can write to memory or
storage can push a job forward. When all copies of a step were complete and only the record of it was lost,
the job goes back to the step before.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from windtunnel.training.checkpoint.model import SHARED, Copy, Log, RestorePlan, Source


@dataclass(frozen=True)
class BadCopy:
    """A copy that turned out missing, torn or corrupt: not to be tried again.

    ``place``: its holder's place, None for storage. ``shard``: "" for all of the step there.
    """

    place: int | None
    shard: str
    step: int


@dataclass(frozen=True)
class StoredShard:
    """A shard of a step in storage; fields as in `model.Copy`."""

    shard: str
    nbytes: int
    checksum: str
    layout: str


@dataclass(frozen=True)
class StoredStep:
    """A step in storage. ``bad``: why it cannot be used (torn, foreign, of another version), "" if it can.
    ``check``: the checksum of its manifest."""

    step: int
    world: int = 0
    has_shared: bool = False
    generation: int = 0
    shards: tuple[StoredShard, ...] = ()
    bad: str = ""
    check: str = ""


@dataclass(frozen=True)
class _Entry:
    """A copy, wherever it lies (``place`` None: storage)."""

    place: int | None
    shard: str
    generation: int
    checksum: str
    layout: str
    nbytes: int

    @property
    def content(self) -> tuple[str, str, int]:
        return self.checksum, self.layout, self.nbytes


@dataclass(frozen=True)
class _Kind:
    """What copies must agree in to be of one checkpoint."""

    step: int
    world: int
    has_shared: bool


def needed_shards(world: int, has_shared: bool) -> tuple[str, ...]:
    """The shards of a complete step."""
    return (*(f"rank{rank}" for rank in range(world)), *((SHARED,) if has_shared else ()))


def plan_restore(
    copies: Sequence[Copy],
    stored: Sequence[StoredStep],
    bad: frozenset[BadCopy] = frozenset(),
    log: Log | None = None,
    restart: bool = True,
) -> RestorePlan:
    """The newest step that can be restored, and the sources of each of its shards.

    ``copies``: what all reachable hosts list. ``stored``: what storage lists; steps with ``bad`` are
    passed over. ``bad``: found out while restoring; plan again with what failed added. ``log``: what the
    supervisor's log knows; None where there is no supervisor, and all is believed. ``restart``: whether the
    job may begin anew where it had a committed step that is lost; else the plan has ``failed``.

    Sources in memory have the tier ``"peer"`` and are ordered so that first choices are spread evenly over
    the holders; the reader puts its own place first with `local_first`. Storage comes last. The order of the
    arguments does not matter.
    """
    known, there, unknown = _believed(copies, stored, log)
    kinds = _kinds(known, there, bad)
    passed: list[str] = []
    for kind in sorted(kinds, key=lambda k: (k.step, _newest(kinds[k]), k.world, k.has_shared), reverse=True):
        shards = needed_shards(kind.world, kind.has_shared)
        lacking = ""
        for family in _families(kinds[kind]):
            chosen = {shard: _agreed(shard, [e for e in family if e.shard == shard]) for shard in shards}
            missing = [shard for shard in shards if not chosen[shard]]
            if not missing:
                told, ignored = _told_unknown(unknown, kind.step)
                reason = _reason(kind, chosen, [*told, *passed], bad)
                return RestorePlan(kind.step, kind.world, _sources(chosen), reason, ignored)
            lacking = lacking or _lacking(kind, missing, family)
        passed.append(lacking)
    torn = [f"step {one.step} in storage is unusable: {one.bad}" for one in stored if one.bad]
    told, ignored = _told_unknown(unknown, -1)
    words = "; ".join(_short([*told, *passed, *torn]))
    reason = f"nothing can be restored: {words}" if words else "nothing was saved yet"
    failed = ""
    if log is not None and log.newest >= 0 and not restart:
        failed = f"step {log.newest} was committed, and no whole checkpoint is left" + (
            f" ({words})" if words else " (no host and no storage has a copy)"
        )
    return RestorePlan(None, reason=reason, ignored=ignored, failed=failed)


def local_first(plan: RestorePlan, place: int) -> RestorePlan:
    """``plan`` for a reader at ``place``: what lies in its own memory first, with tier ``"memory"``."""

    def mine(sources: tuple[Source, ...]) -> tuple[Source, ...]:
        own = tuple(Source("memory", place) for source in sources if source.place == place)
        return own + tuple(source for source in sources if source.place != place)

    return replace(plan, sources=tuple((shard, mine(sources)) for shard, sources in plan.sources))


def _believed(
    copies: Sequence[Copy], stored: Sequence[StoredStep], log: Log | None
) -> tuple[Sequence[Copy], Sequence[StoredStep], list[tuple[int, bool, str]]]:
    """What the log knows of; and the steps that it does not know: each with whether it is whole, and in
    words."""
    if log is None:
        return copies, stored, []
    committed = {(one.step, one.course) for one in log.committed}
    persisted = {(one.step, one.course, one.check) for one in log.persisted}
    unknown: dict[tuple[int, int, int, bool], set[str]] = defaultdict(set)
    for copy in copies:
        if (copy.step, copy.generation) not in committed:
            unknown[copy.step, copy.generation, copy.world, copy.has_shared].add(copy.shard)
    found = []
    for (step, _, world, has_shared), shards in sorted(unknown.items(), reverse=True):
        needed = needed_shards(world, has_shared)
        here = f"{len(shards & set(needed))} of {len(needed)} shards"
        told = f"step {step} in memory ({here}) is not in the run's log as committed"
        found.append((step, set(needed) <= shards, told))
    foreign = {
        (one.step, one.generation)
        for one in stored
        if not one.bad and (one.step, one.generation, one.check) not in persisted
    }
    for step, _ in sorted(foreign, reverse=True):
        found.append((step, True, f"step {step} in storage is not in the run's log as written by it"))
    known = [copy for copy in copies if (copy.step, copy.generation) in committed]
    return known, [one for one in stored if (one.step, one.generation) not in foreign], found


def _told_unknown(unknown: Sequence[tuple[int, bool, str]], step: int) -> tuple[list[str], tuple[str, ...]]:
    """Of what no log knows, what is newer than ``step``: all of it in words, and the whole steps."""
    newer = [(whole, told) for at, whole, told in unknown if at > step]
    return [told for _, told in newer], tuple(told for whole, told in newer if whole)


def _kinds(
    copies: Sequence[Copy], stored: Sequence[StoredStep], bad: frozenset[BadCopy]
) -> dict[_Kind, list[_Entry]]:
    kinds: dict[_Kind, list[_Entry]] = defaultdict(list)

    def excluded(place: int | None, shard: str, step: int) -> bool:
        return BadCopy(place, shard, step) in bad or BadCopy(place, "", step) in bad

    for copy in copies:
        if not excluded(copy.place, copy.shard, copy.step):
            kinds[_Kind(copy.step, copy.world, copy.has_shared)].append(
                _Entry(copy.place, copy.shard, copy.generation, copy.checksum, copy.layout, copy.nbytes)
            )
    for one in stored:
        for shard in one.shards:
            if not one.bad and not excluded(None, shard.shard, one.step):
                kinds[_Kind(one.step, one.world, one.has_shared)].append(
                    _Entry(None, shard.shard, one.generation, shard.checksum, shard.layout, shard.nbytes)
                )
    return kinds


def _newest(entries: Sequence[_Entry]) -> int:
    return max(entry.generation for entry in entries)


def _families(entries: Sequence[_Entry]) -> Iterator[list[_Entry]]:
    """Sets of copies that may be mixed: a generation with the older and newer ones of the same course."""
    by: dict[int, list[_Entry]] = defaultdict(list)
    for entry in entries:
        by[entry.generation].append(entry)
    for generation in sorted(by, reverse=True):
        family = list(by[generation])
        for other in sorted(by, reverse=True):
            if other != generation and _fit(family, by[other]):
                family += by[other]
        yield family


def _fit(left: Sequence[_Entry], right: Sequence[_Entry]) -> bool:
    """Whether both are of one course: they share a shard, and no shard that they share differs."""
    ones: dict[str, set[tuple[str, str, int]]] = defaultdict(set)
    others: dict[str, set[tuple[str, str, int]]] = defaultdict(set)
    for entry in left:
        ones[entry.shard].add(entry.content)
    for entry in right:
        others[entry.shard].add(entry.content)
    common = ones.keys() & others.keys()
    return bool(common) and all(ones[shard] == others[shard] and len(ones[shard]) == 1 for shard in common)


def _agreed(shard: str, entries: Sequence[_Entry]) -> list[_Entry]:
    """The copies of ``shard`` to believe: of the newest generation, and equal to each other."""
    if not entries:
        return []
    newest = _newest(entries)
    votes = Counter(entry.content for entry in entries if entry.generation == newest)
    (content, most), *others = sorted(votes.items(), key=lambda vote: (-vote[1], vote[0]))
    if others and others[0][1] == most:
        if shard != SHARED:
            return []
        tied = [e for e in entries if e.generation == newest and votes[e.content] == most]
        content = min(tied, key=lambda e: (e.place is None, e.place or 0, e.content)).content
    return [entry for entry in entries if entry.content == content]


def _sources(chosen: dict[str, list[_Entry]]) -> tuple[tuple[str, tuple[Source, ...]], ...]:
    """Each shard's holders, those with fewer bytes to serve first; storage last."""
    load: Counter[int] = Counter()
    out: dict[str, tuple[Source, ...]] = {}
    # Shards with the fewest holders first: they have the least choice.
    for shard in sorted(chosen, key=lambda s: (len({e.place for e in chosen[s]}), -chosen[s][0].nbytes, s)):
        entries = chosen[shard]
        holders = sorted({e.place for e in entries if e.place is not None}, key=lambda p: (load[p], p))
        if holders:
            load[holders[0]] += max(1, entries[0].nbytes)
        stored = (Source("storage", None),) if any(e.place is None for e in entries) else ()
        out[shard] = (*(Source("peer", place) for place in holders), *stored)
    return tuple((shard, out[shard]) for shard in chosen)


def _lacking(kind: _Kind, missing: Sequence[str], family: Sequence[_Entry]) -> str:
    found = {entry.shard for entry in family}
    torn = [shard for shard in missing if shard in found]
    shards = len(needed_shards(kind.world, kind.has_shared))
    if torn:
        return f"step {kind.step} has copies of {', '.join(torn)} that disagree"
    names = ", ".join(missing[:4]) + (", .." if len(missing) > 4 else "")
    return f"step {kind.step} lacks {names} ({shards - len(missing)} of {shards} shards are left)"


def _reason(
    kind: _Kind, chosen: dict[str, list[_Entry]], passed: Sequence[str], bad: frozenset[BadCopy]
) -> str:
    in_memory = sum(any(e.place is not None for e in entries) for entries in chosen.values())
    if in_memory == len(chosen):
        told = f"step {kind.step} from memory: each of {len(chosen)} shards has a copy"
    elif in_memory:
        told = f"step {kind.step}: {in_memory} of {len(chosen)} shards from memory, the others from storage"
    else:
        told = f"step {kind.step} from storage: nothing newer or equal is whole in memory"
    corrupt = len(bad)
    if corrupt:
        told += f"; {corrupt} bad {'copy was' if corrupt == 1 else 'copies were'} passed over"
    return "; ".join([told, *_short(passed)])


def _short(told: Sequence[str]) -> list[str]:
    return list(told[:3]) + ([f"and {len(told) - 3} steps more"] if len(told) > 3 else [])
