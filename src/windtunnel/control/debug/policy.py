"""In which order recorded transactions are made again, and in which other orders they could have come.

Under snapshot isolation what a transaction reads depends on one thing: which writers its snapshot shows. The
number of these puts all in order, and a writer stays uncommitted until a snapshot shows it (R3, PVLDB 16(11),
2023). R3's artefact goes by ids, which is wrong where an id is given after the snapshot, as Postgres does.

Other orders are those in which requests that overlapped might have come; of those that agree on all pairs
of conflicting transactions one is tried (Mazurkiewicz, 1977). A preemption is a step at which not the
earliest transaction that is left goes next (delay bounding: Emmi, Qadeer, Rakamaric, POPL 2011).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Transaction:
    """``request``: whose it is. ``id``: of one that wrote and committed, else 0. Its snapshot shows the ids
    below ``xmax`` that are not ``active``. ``begun``: when its request came, ``ended``: when it was over,
    seconds. ``reads``, ``writes``: tables, where other orders are wanted."""

    request: int
    id: int
    xmax: int
    active: tuple[int, ...] = ()
    begun: float = 0.0
    ended: float = 0.0
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Observation:
    """``transactions``: as they stand in the trace. ``limit``: orders wanted at most, the recorded one first,
    others within so many ``preemptions`` of it. ``work``: comparisons after which no more are counted."""

    transactions: tuple[Transaction, ...]
    preemptions: int = 0
    limit: int = 1
    work: int = 2_000_000


@dataclass(frozen=True)
class Step:
    """The transaction ``run``, an index, is made once those in ``commit`` are committed."""

    run: int
    commit: tuple[int, ...] = ()


@dataclass(frozen=True)
class Decision:
    """``orders``: to be tried. ``possible``: orders within the preemptions that differ in a conflict, or more
    where they are not all ``counted``."""

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


def serial(observation: Observation) -> Decision:
    """One request after the other as they came, each committed at once: what a naive replay does."""
    begun = [transaction.begun for transaction in observation.transactions]
    return Decision((_one_by_one(sorted(range(len(begun)), key=begun.__getitem__)),))


POLICIES: Mapping[str, Callable[[Observation], Decision]] = {"snapshot": decide, "serial": serial}


def _by_snapshot(transactions: Sequence[Transaction]) -> tuple[Step, ...]:
    ids = sorted(transaction.id for transaction in transactions if transaction.id)
    rows = [
        bisect_left(ids, transaction.xmax) - len({*transaction.active}.intersection(ids))
        for transaction in transactions
    ]
    rank = [(rows[k], transaction.id > 0) for k, transaction in enumerate(transactions)]
    steps, uncommitted = list[Step](), list[int]()
    for k in sorted(range(len(rank)), key=rank.__getitem__):
        reader, ids_of = transactions[k], {c: transactions[c].id for c in uncommitted}
        due = tuple(c for c in uncommitted if ids_of[c] < reader.xmax and ids_of[c] not in reader.active)
        steps.append(Step(k, due))
        uncommitted = [c for c in uncommitted if c not in due] + [k] * (reader.id > 0)
    return tuple(steps)


def _one_by_one(order: Sequence[int]) -> tuple[Step, ...]:
    return tuple(Step(k, tuple(order[place - 1 : place])) for place, k in enumerate(order))


def _others(observation: Observation, recorded: tuple[Step, ...]) -> Decision:
    """The recorded order, then those with one preemption, then two, as far as they differ in a conflict."""
    transactions = [observation.transactions[step.run] for step in recorded]
    before = _before(transactions)
    pairs = [
        (i, j)
        for j, two in enumerate(transactions)
        for i, transaction in enumerate(transactions[:j])
        if not before[j] >> i & 1
        and {*transaction.writes} & {*two.reads, *two.writes} | {*two.writes} & {*transaction.reads}
    ]
    work, classes, orders = [observation.work], {(True,) * len(pairs)}, [recorded]
    for preemptions in range(1, observation.preemptions + 1 if pairs else 0):
        for order in _deviating(list(range(len(transactions))), 0, preemptions, before, work):
            place = {k: number for number, k in enumerate(order)}
            conflicts = tuple(place[i] < place[j] for i, j in pairs)
            work[0] -= len(pairs)
            if conflicts not in classes and len(orders) < observation.limit:
                orders.append(_one_by_one([recorded[k].run for k in order]))
            classes.add(conflicts)
    why = f"{len(pairs)} pairs of transactions conflict and could have come in the other order"
    return Decision(tuple(orders), len(classes), work[0] > 0, why)


def _before(transactions: Sequence[Transaction]) -> list[int]:
    """For each the set of those (bits) that come before it in any order: earlier ones of its request, and
    all of requests that were over when its own came."""
    over = dict[int, float]()
    for transaction in transactions:
        over[transaction.request] = max(over.get(transaction.request, 0.0), transaction.ended)
    return [
        sum(1 << i for i, transaction in enumerate(transactions[:j])
            if transaction.request == two.request or over[transaction.request] < two.begun)
        for j, two in enumerate(transactions)
    ]  # fmt: skip


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
                moved = [*order[:place], order[other], *order[place:other], *order[other + 1 :]]
                if preemptions == 1:
                    yield moved
                else:
                    yield from _deviating(moved, place + 1, preemptions - 1, before, work)
