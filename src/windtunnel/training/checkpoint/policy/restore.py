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

A write to storage ends with its generation. So the step that the job goes on from is written there, where
the last one that was wanted there is not.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from windtunnel.training.checkpoint.model import (
    SHARED,
    Copy,
    Log,
    RestorePlan,
    StoredStep,
    needed_shards,
)


@dataclass(frozen=True)
class BadCopy:
    """A copy that turned out missing, torn or corrupt: not to be tried again.

    ``place``: its holder's place, None for storage. ``shard``: "" for all of the step there.
    """

    place: int | None
    shard: str
    step: int


Kind = tuple[int, int, bool]
"""What copies must agree in to be of one checkpoint: step, world, has_shared."""


def plan_restore(
    copies: Sequence[Copy],
    stored: Sequence[StoredStep],
    bad: frozenset[BadCopy] = frozenset(),
    log: Log | None = None,
    restart: bool = True,
    unread: bool = False,
) -> RestorePlan:
    """The newest step that can be restored, and the sources of each of its shards.

    ``copies``: what all reachable hosts list. ``stored``: what storage lists; steps with ``bad`` are
    passed over. ``bad``: found out while restoring; plan again with what failed added. ``log``: what the
    supervisor's log knows; None where there is no supervisor, and all is believed. ``restart``: whether the
    job may begin anew where it had a committed step that is lost; else the plan has ``failed``. ``unread``:
    storage could not be read; that matters where no step is left, or the log knows of a newer one there.

    Copies in memory are ordered so that first choices are spread evenly over the holders; the reader puts its
    own place first with `local_first`. Storage comes last. The order of the arguments does not matter.
    """
    committed_copies, there, unknown = _believed(copies, stored, log)
    kinds = _kinds(committed_copies, there, bad)
    passed: list[str] = []
    # the generation decides between checkpoints of jobs of different sizes
    for kind in sorted(kinds, key=lambda k: (k[0], _newest(kinds[k]), *k[1:]), reverse=True):
        step, world, has_shared = kind
        shards = needed_shards(world, has_shared)
        lacking = ""
        for family in _families(kinds[kind]):
            chosen = {name: _agreed(name, [c for c in family if c.shard.name == name]) for name in shards}
            missing = [name for name in shards if not chosen[name]]
            if not missing:
                reasons, ignored = _unknown_in_words(unknown, step)
                reason = _reason(step, chosen, [*reasons, *passed], bad)
                newer = log is not None and any(persisted.step > step for persisted in log.persisted)
                sources, owed = _sources(chosen), _owed(log, step)
                return RestorePlan(step, world, sources, reason, ignored, store=owed, unread=unread and newer)
            lacking = lacking or _lacking(step, len(shards), missing, family)
        passed.append(lacking)
    torn = [
        f"step {stored_step.step} in storage is unusable: {stored_step.bad}"
        for stored_step in stored
        if stored_step.bad
    ]
    reasons, ignored = _unknown_in_words(unknown, -1)
    words = "; ".join(_short([*reasons, *passed, *torn]))
    reason = f"nothing can be restored: {words}" if words else "nothing was saved yet"
    failed = ""
    if log is not None and log.newest >= 0 and not restart:
        failed = f"step {log.newest} was committed, and no whole checkpoint is left" + (
            f" ({words})" if words else " (no host and no storage has a copy)"
        )
    return RestorePlan(None, reason=reason, ignored=ignored, failed=failed, unread=unread)


def local_first(copies: Sequence[Copy], place: int) -> list[Copy]:
    """In the order in which a reader at ``place`` tries them: what lies in its own memory first."""
    return sorted(copies, key=lambda copy: copy.place != place)


def _believed(
    copies: Sequence[Copy], stored: Sequence[StoredStep], log: Log | None
) -> tuple[Sequence[Copy], Sequence[StoredStep], list[tuple[int, bool, str]]]:
    """What the log knows of; and the steps that it does not know: each with whether it is whole, and in
    words."""
    if log is None:
        return copies, stored, []
    committed = {(commit.step, commit.course) for commit in log.committed}
    persisted = {(persisted.step, persisted.course, persisted.check) for persisted in log.persisted}
    unknown: dict[tuple[int, int, int, bool], set[str]] = defaultdict(set)
    for shard in (copy.shard for copy in copies):
        if (shard.step, shard.generation) not in committed:
            unknown[shard.step, shard.generation, shard.world, shard.has_shared].add(shard.name)
    steps = []
    for (step, _, world, has_shared), shards in sorted(unknown.items(), reverse=True):
        needed = needed_shards(world, has_shared)
        here = f"{len(shards & set(needed))} of {len(needed)} shards"
        text = f"step {step} in memory ({here}) is not in the run's log as committed"
        steps.append((step, set(needed) <= shards, text))
    foreign = {
        (stored_step.step, stored_step.generation)
        for stored_step in stored
        if not stored_step.bad
        and (stored_step.step, stored_step.generation, stored_step.check) not in persisted
    }
    for step, _ in sorted(foreign, reverse=True):
        steps.append((step, True, f"step {step} in storage is not in the run's log as written by it"))
    committed_copies = [copy for copy in copies if (copy.shard.step, copy.shard.generation) in committed]
    return (
        committed_copies,
        [stored_step for stored_step in stored if (stored_step.step, stored_step.generation) not in foreign],
        steps,
    )


def _owed(log: Log | None, step: int) -> bool:
    """Whether the last step that was wanted in storage is not there, and lies behind a job that goes on from
    ``step``: what was under way to storage ends with its generation."""
    if log is None or not 0 <= log.due <= step:
        return False
    return all(persisted.step != log.due for persisted in log.persisted)


def _unknown_in_words(
    unknown: Sequence[tuple[int, bool, str]], step: int
) -> tuple[list[str], tuple[str, ...]]:
    """Of what no log knows, what is newer than ``step``: all of it in words, and the whole steps."""
    newer = [(whole, text) for at, whole, text in unknown if at > step]
    return [text for _, text in newer], tuple(text for whole, text in newer if whole)


def _kinds(
    copies: Sequence[Copy], stored: Sequence[StoredStep], bad: frozenset[BadCopy]
) -> dict[Kind, list[Copy]]:
    kinds: dict[Kind, list[Copy]] = defaultdict(list)
    in_storage = (
        Copy(None, shard) for stored_step in stored if not stored_step.bad for shard in stored_step.shards
    )
    for copy in chain(copies, in_storage):
        place, shard = copy.place, copy.shard
        if not bad & {BadCopy(place, shard.name, shard.step), BadCopy(place, "", shard.step)}:
            kinds[shard.step, shard.world, shard.has_shared].append(copy)
    return kinds


def _newest(copies: Sequence[Copy]) -> int:
    return max(copy.shard.generation for copy in copies)


def _families(copies: Sequence[Copy]) -> Iterator[list[Copy]]:
    """Sets of copies that may be mixed: a generation with the older and newer ones of the same course."""
    by: dict[int, list[Copy]] = defaultdict(list)
    for copy in copies:
        by[copy.shard.generation].append(copy)
    for generation in sorted(by, reverse=True):
        family = list(by[generation])
        for other in sorted(by, reverse=True):
            if other != generation and _fit(family, by[other]):
                family += by[other]
        yield family


def _fit(left: Sequence[Copy], right: Sequence[Copy]) -> bool:
    """Whether both are of one course: they share a shard, and no shard that they share differs."""
    ones, others = _contents(left), _contents(right)
    common = ones.keys() & others.keys()
    return bool(common) and all(ones[name] == others[name] and len(ones[name]) == 1 for name in common)


def _contents(copies: Sequence[Copy]) -> dict[str, set[tuple[str, str, int]]]:
    by_shard: dict[str, set[tuple[str, str, int]]] = defaultdict(set)
    for copy in copies:
        by_shard[copy.shard.name].add(copy.shard.content)
    return by_shard


def _agreed(name: str, copies: Sequence[Copy]) -> list[Copy]:
    """The copies of a shard to believe: of the newest generation, and equal to each other."""
    if not copies:
        return []
    newest = [copy for copy in copies if copy.shard.generation == _newest(copies)]
    votes = Counter(copy.shard.content for copy in newest)
    (content, most), *others = sorted(votes.items(), key=lambda vote: (-vote[1], vote[0]))
    if others and others[0][1] == most:
        if name != SHARED:
            return []
        tied = [copy for copy in newest if votes[copy.shard.content] == most]
        content = min(tied, key=lambda c: (c.place is None, c.place or 0, c.shard.content)).shard.content
    return [copy for copy in copies if copy.shard.content == content]


def _sources(chosen: dict[str, list[Copy]]) -> tuple[tuple[Copy, ...], ...]:
    """Each shard's copies, with holders that have fewer bytes to serve first; storage last. Of several with
    one holder, the newest."""
    load: Counter[int] = Counter()
    out: dict[str, tuple[Copy, ...]] = {}
    newest = {
        name: {c.place: c for c in sorted(copies, key=lambda c: c.shard.generation)}
        for name, copies in chosen.items()
    }
    # Shards with the fewest holders first: they have the least choice.
    for name in sorted(chosen, key=lambda s: (len(newest[s]), -chosen[s][0].shard.nbytes, s)):
        at = newest[name]
        holders = sorted((place for place in at if place is not None), key=lambda p: (load[p], p))
        if holders:
            load[holders[0]] += max(1, chosen[name][0].shard.nbytes)
        out[name] = (*(at[place] for place in holders), *([at[None]] if None in at else []))
    return tuple(out[name] for name in chosen)


def _lacking(step: int, shards: int, missing: Sequence[str], family: Sequence[Copy]) -> str:
    there = {copy.shard.name for copy in family}
    torn = [name for name in missing if name in there]
    if torn:
        return f"step {step} has copies of {', '.join(torn)} that disagree"
    names = ", ".join(missing[:4]) + (", .." if len(missing) > 4 else "")
    return f"step {step} lacks {names} ({shards - len(missing)} of {shards} shards are left)"


def _reason(step: int, chosen: dict[str, list[Copy]], passed: Sequence[str], bad: frozenset[BadCopy]) -> str:
    in_memory = sum(any(copy.place is not None for copy in copies) for copies in chosen.values())
    if in_memory == len(chosen):
        text = f"step {step} from memory: each of {len(chosen)} shards has a copy"
    elif in_memory:
        text = f"step {step}: {in_memory} of {len(chosen)} shards from memory, the others from storage"
    else:
        text = f"step {step} from storage: nothing newer or equal is whole in memory"
    corrupt = len(bad)
    if corrupt:
        text += f"; {corrupt} bad {'copy was' if corrupt == 1 else 'copies were'} passed over"
    return "; ".join([text, *_short(passed)])


def _short(texts: Sequence[str]) -> list[str]:
    return list(texts[:3]) + ([f"and {len(texts) - 3} steps more"] if len(texts) > 3 else [])
