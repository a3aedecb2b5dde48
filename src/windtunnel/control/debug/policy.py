"""In which order recorded transactions are made again, and in which other orders they could have come.

Under snapshot isolation what a transaction reads depends on one thing alone: which writers had committed when
its snapshot was taken. Snapshots are taken one after the other, so what they show is nested, and the number of
recorded writers that a snapshot shows puts all transactions in order. A writer stays uncommitted until the
first snapshot that shows it (R3, PVLDB 16(11), 2023, faithful replay).

R3's artefact goes by transaction id instead. That is wrong where an id is assigned after the snapshot was
taken, as Postgres does. `by_id`, `serial` and `by_commit` are the orders that others use: they are here to be
held against `decide`, and fail on traces that tests make.

Other orders are those in which requests that overlapped might have come. Of orders that agree on all pairs of
conflicting transactions one is tried (Mazurkiewicz, 1977). A preemption is a step at which another transaction
than the earliest one that is left goes first (delay bounding: Emmi, Qadeer, Rakamarić, POPL 2011).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

WORK = 2_000_000
"""Comparisons after which orders are no more counted: some seconds."""


@dataclass(frozen=True)
class Transaction:
    """``request``: whose it is. ``id``: as a writer's, 0 for a reader; ``commits``: it changed something for
    good. Its snapshot shows all ids below ``xmax`` that are not ``active``. ``seq``: drawn inside it.
    ``begun``, ``ended``: when its request came, and when it had committed, seconds. ``reads``, ``writes``: the
    tables that it uses, known where other orders are wanted."""

    request: int
    id: int
    commits: bool
    xmax: int
    active: tuple[int, ...] = ()
    seq: int = 0
    begun: float = 0.0
    ended: float = 0.0
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Observation:
    """``transactions``: in the order of the trace. ``limit``: how many orders are wanted, the recorded one
    first, others within so many ``preemptions`` of it."""

    transactions: tuple[Transaction, ...]
    preemptions: int = 0
    limit: int = 1


@dataclass(frozen=True)
class Step:
    """The transaction ``run``, an index, is made once those in ``commit`` are committed."""

    run: int
    commit: tuple[int, ...] = ()


@dataclass(frozen=True)
class Decision:
    """``orders``: to be tried. ``possible``: orders within the preemptions that differ in a conflict, at
    least; ``counted``: there are no more."""

    orders: tuple[tuple[Step, ...], ...]
    possible: int = 1
    counted: bool = True
    reason: str = field(default="", compare=False)


def decide(observation: Observation) -> Decision:
    """The recorded order by snapshots, and others where more than one is wanted."""
    recorded = _by_snapshot(observation.transactions)
    if observation.limit == 1:
        return Decision((recorded,), reason="in the order of snapshots, readers before the next writer")
    return _others(observation, recorded)


def by_id(observation: Observation) -> Decision:
    """The order of ids, as R3's artefact has it; a reader has that of its snapshot."""
    rank = [(one.id or one.xmax, one.id > 0) for one in observation.transactions]
    return Decision((_kept_open(observation.transactions, rank),))


def serial(observation: Observation) -> Decision:
    """One request after the other, in the order in which they came."""
    return Decision((_at_once(observation.transactions, lambda one: one.begun),))


def by_commit(observation: Observation) -> Decision:
    """By numbers that are given after the commit, outside of the transaction."""
    return Decision((_at_once(observation.transactions, lambda one: one.ended),))


POLICIES: Mapping[str, Callable[[Observation], Decision]] = {
    "snapshot": decide, "id": by_id, "serial": serial, "committed": by_commit,
}  # fmt: skip


def shows(snapshot: Transaction, writer: Transaction) -> bool:
    """Whether the snapshot of one transaction shows what another one wrote."""
    return writer.commits and writer.id < snapshot.xmax and writer.id not in snapshot.active


def _by_snapshot(transactions: Sequence[Transaction]) -> tuple[Step, ...]:
    ids = sorted(one.id for one in transactions if one.commits)
    known = set(ids)
    shown = [bisect_left(ids, one.xmax) - len(known.intersection(one.active)) for one in transactions]
    return _kept_open(
        transactions, [(shown[k], one.commits, one.seq) for k, one in enumerate(transactions)]
    )


def _kept_open(transactions: Sequence[Transaction], rank: Sequence[tuple[int, ...]]) -> tuple[Step, ...]:
    """By ``rank``; a writer is committed when a snapshot shows it, and not before."""
    steps, uncommitted = list[Step](), list[int]()
    for k in sorted(range(len(transactions)), key=rank.__getitem__):
        due = tuple(c for c in uncommitted if shows(transactions[k], transactions[c]))
        steps.append(Step(k, due))
        uncommitted = [c for c in uncommitted if c not in due] + [k] * transactions[k].commits
    return tuple(steps)


def _at_once(transactions: Sequence[Transaction], time: Callable[[Transaction], float]) -> tuple[Step, ...]:
    return _one_by_one(sorted(range(len(transactions)), key=lambda k: time(transactions[k])))


def _one_by_one(order: Sequence[int]) -> tuple[Step, ...]:
    return tuple(Step(k, tuple(order[place - 1 : place])) for place, k in enumerate(order))


def _others(observation: Observation, recorded: tuple[Step, ...]) -> Decision:
    """Recorded order first, then those with one preemption, then two, as far as they differ in a conflict."""
    transactions = [observation.transactions[step.run] for step in recorded]
    before = _before(transactions)
    pairs = _conflicts(transactions, before)
    work = [WORK]
    classes = {tuple(True for _ in pairs)}
    orders = [recorded]
    for preemptions in range(1, observation.preemptions + 1 if pairs else 0):
        for order in _deviating(list(range(len(transactions))), 0, preemptions, before, work):
            place = {k: number for number, k in enumerate(order)}
            conflicts = tuple(place[i] < place[j] for i, j in pairs)
            work[0] -= len(pairs)
            if conflicts not in classes:
                classes.add(conflicts)
                if len(orders) < observation.limit:
                    orders.append(_one_by_one([recorded[k].run for k in order]))
    return Decision(
        tuple(orders), len(classes), work[0] > 0, f"{len(pairs)} pairs of transactions conflict and overlapped"
    )


def _before(transactions: Sequence[Transaction]) -> list[int]:
    """For each the set of those (bits) that come before it in any order: earlier ones of its request, and
    all of requests that were over when its own came."""
    over = dict[int, float]()
    for one in transactions:
        over[one.request] = max(over.get(one.request, 0.0), one.ended)
    return [
        sum(
            1 << i
            for i, earlier in enumerate(transactions[:j])
            if earlier.request == one.request or over[earlier.request] < one.begun
        )
        for j, one in enumerate(transactions)
    ]


def _conflicts(transactions: Sequence[Transaction], before: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of which one writes a table that the other uses, and whose order is not fixed."""
    uses = [(set(one.reads) | set(one.writes), set(one.writes)) for one in transactions]
    return [
        (i, j)
        for j in range(len(transactions))
        for i in range(j)
        if not before[j] >> i & 1 and (uses[i][1] & uses[j][0] or uses[i][0] & uses[j][1])
    ]


def _deviating(
    order: list[int], start: int, preemptions: int, before: Sequence[int], work: list[int]
) -> Iterator[list[int]]:
    """Orders that take from place ``start`` on, ``preemptions`` times, not the earliest of what is left."""
    for place in range(start, len(order)):
        skipped = 0
        for other in range(place + 1, len(order)):
            work[0] -= 1
            if work[0] <= 0:
                return
            skipped |= 1 << order[other - 1]
            if not before[order[other]] & skipped:
                earlier = [order[other], *order[place:other], *order[other + 1 :]]
                made = order[:place] + earlier
                if preemptions == 1:
                    yield made
                else:
                    yield from _deviating(made, place + 1, preemptions - 1, before, work)
