"""What is known of a job's ranks and can be decided on it (plain data, written to the run's log), and which
ranks to check, because a captured rank that stands for them may not do what they do.

Witnesses exclude what depends on a rank's place on an axis: that shards become uneven, or that the first and
the last are special. They do not exclude what a program makes of the number of a rank (``if rank == 7``). So
its conditions on the rank are collected, and the world is cut into *cases*: ranks for which the same captured
one stands, and for which every condition comes out alike. One rank of each case that has none is checked: run
for its outline only. A condition that cannot be worked out for other ranks makes every place that it asks for
(every rank, as a rule) a case of its own. There may be more of these than can be run; then they are taken
from all over the world, and the others stay assumed.

A rank whose outline is that of another class belongs to it, with its whole case. One whose outline nobody
else has is captured. Nothing here depends on time: the same observations make the same decisions.

What a place of the program was told on the captured ranks shows which function of the rank it asks for: the
rank itself, its number on the host, the host, or its place in a family of groups. Where several fit, each is
taken in turn. The expression is then worked out for all ranks by simpleeval, which walks its syntax tree: no
code of the program is run.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.training.emulate.policy.groups import Axes, FamilyShape, find_axes

CAPTURE_LIMIT = 256
CHECK_LIMIT = 16
REFUSED = -1


@dataclass(frozen=True)
class RankSource:
    """A place in the user's program that asks which rank it is: ``values[rank]`` is what that captured rank
    was told there."""

    site: str
    values: dict[int, int]


@dataclass(frozen=True)
class Condition:
    """A place in the user's program where what happens depends on the rank.

    ``text``: a Python expression of ``v0``, ``v1``… that stand for what ``sources`` (rows of the
    observation's) tell; without it, the rank itself. ``involved``: it is not what decides, but enters there
    into something that cannot be worked out for another rank.
    """

    site: str
    text: str = ""
    sources: tuple[int, ...] = ()
    involved: bool = False


@dataclass(frozen=True)
class Observation:
    """What is known of a job's ranks so far.

    ``ranks``: what the user wants captured, ``auto``, ``all``, or as in ``0,17,120-127``. ``limit``: ranks
    that are captured at most where the choice is free. ``captured``: for each rank that was, in their order,
    the number of its class (ranks that did the same). ``families``: of process groups, those that cover the
    world, in the order of their making; ``peers``: to whom the first rank sends or from whom it receives.
    ``jobs``: ranks captured at once. ``seconds_each``: that the process of a rank took, in the mean.

    ``checks``: ranks that may be checked, if not more than half as many as are captured; 0: none may.
    ``calls``: for each class, the number of its outline (what it calls, in which order). ``checked``: for
    each rank of which only the outline was taken, that outline's number, or `REFUSED`. ``conditions``: of the
    user's program, on the rank, as what was captured shows them; ``devices_per_host`` of the cluster.
    """

    world_size: int
    ranks: str = "auto"
    limit: int = CAPTURE_LIMIT
    captured: dict[int, int] = field(default_factory=dict)
    families: tuple[FamilyShape, ...] = ()
    peers: tuple[int, ...] = ()
    jobs: int = 1
    seconds_each: float | None = None
    checks: int = 0
    calls: tuple[int, ...] = ()
    checked: dict[int, int] = field(default_factory=dict)
    conditions: tuple[Condition, ...] = ()
    sources: tuple[RankSource, ...] = ()
    devices_per_host: int = 1

    @property
    def axes(self) -> Axes:
        """Raises `ValueError` before a first rank is captured."""
        if not self.captured:
            raise ValueError("no rank is captured")
        return find_axes(self.world_size, next(iter(self.captured)), self.families, self.peers)


@dataclass(frozen=True)
class Capture:
    """Capture these ranks next."""

    ranks: tuple[int, ...]
    why: str


@dataclass(frozen=True)
class Check:
    """Run these ranks next only for their outlines: whether they call what those that stand for them do."""

    ranks: tuple[int, ...]
    why: str


@dataclass(frozen=True)
class CheckedCells:
    """Nothing more need be run. The cells of the world: on axis a, index i belongs to the segment that the
    last of ``starts[a]`` up to i begins, and a cell's ranks do what its first one does. None: every rank
    does what the nearest captured one does. ``alike``: for ranks of which another captured one is known to
    be the better picture, that one."""

    starts: tuple[tuple[int, ...], ...] | None
    alike: dict[int, int] = field(default_factory=dict)


Decision = Capture | Check | CheckedCells


Longs = NDArray[np.int64]


def verify(observation: Observation, cells: CheckedCells) -> Decision:
    """What remains to be run before ``cells`` holds; in the end, ``cells`` with what the checks showed."""
    captured, checked = observation.captured, observation.checked
    if not observation.checks:
        return cells
    if strange := _strange(observation):
        return Capture(strange, "ranks that call what no captured rank calls")
    stands, _ = stand_ins(observation, cells)
    row = np.zeros(observation.world_size, np.int64)
    row[list(captured)] = list(captured.values())
    certain, involved = outcomes(observation)
    cases = _numbered([row[stands], *certain])
    run = {*captured, *checked}
    room = max(observation.checks, len(captured) // 2) - len(checked)
    if missing := _first_of_each(cases, run)[: max(room, 0)]:
        return Check(missing, "one of each case that the conditions on the rank make")
    finer = _numbered([cases, *involved])
    if missing := _spread(_first_of_each(finer, run), max(room, 0)):
        return Check(missing, "conditions on the rank that only a run can tell")
    return CheckedCells(cells.starts, _alike(observation, finer, row[stands]))


def _strange(observation: Observation) -> tuple[int, ...]:
    """One checked rank of each outline that no captured rank has."""
    first: dict[int, int] = {}
    for rank, number in sorted(observation.checked.items()):
        if number != REFUSED and number not in observation.calls and rank not in observation.captured:
            first.setdefault(number, rank)
    return tuple(first.values())


def _numbered(columns: Sequence[Longs]) -> Longs:
    """For every rank the number of its combination of values in the columns."""
    _, inverse = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    return np.asarray(inverse, np.int64).reshape(-1)


def _first_of_each(cases: Longs, run: set[int]) -> tuple[int, ...]:
    """The first rank of each case in which no rank was run."""
    _, first = np.unique(cases, return_index=True)
    done = set(cases[list(run)].tolist())
    return tuple(sorted(int(rank) for rank in first if int(cases[rank]) not in done))


def _spread(ranks: tuple[int, ...], room: int) -> tuple[int, ...]:
    """At most ``room`` of the ranks, from all over them: halves before quarters, with a step that no regular
    pattern of places shares (the golden section)."""
    if len(ranks) <= room:
        return ranks
    picked: dict[int, None] = {}
    turn = 0
    while len(picked) < room:
        picked[int((turn * 0.6180339887498949 % 1.0) * len(ranks))] = None
        turn += 1
    return tuple(ranks[place] for place in sorted(picked))


def _alike(observation: Observation, cases: Longs, row: Longs) -> dict[int, int]:
    """For ranks of a case that was found to have another outline than its class: a captured rank with it."""
    with_outline: dict[int, int] = {}
    for rank in sorted(observation.captured):
        with_outline.setdefault(observation.calls[observation.captured[rank]], rank)
    alike: dict[int, int] = {}
    for rank, number in sorted(observation.checked.items()):
        if rank in observation.captured or number == observation.calls[row[rank]]:
            continue
        if number not in with_outline:
            continue
        members = np.flatnonzero(cases == cases[rank]).tolist()
        for member in members:
            if member not in observation.captured and (member not in observation.checked or member == rank):
                alike[member] = with_outline[number]
    return dict(sorted(alike.items()))


LENGTH = 1 << 16
"""Numbers of the longest range that is worked out."""


class Involved(Exception):
    """The expression is beyond what can be worked out."""


def outcomes(observation: Observation) -> tuple[list[Longs], list[Longs]]:
    """Columns of numbers, one of each rank: (what conditions come to, what tells all ranks apart and may
    matter in a way that is not known). Ranks that are equal in a column cannot be told apart by it.

    A condition that is worked out and comes to something else on every rank, as the rank does itself, is no
    column: the witnesses differ in it.
    """
    ranks = np.arange(observation.world_size)
    columns: dict[bytes, Longs] = {}
    apart = False
    for condition in observation.conditions:
        for column, unknown in _columns(condition, observation):
            if len(np.unique(column)) < len(ranks):
                columns.setdefault(column.tobytes(), column)
            else:
                apart = apart or unknown
    return list(columns.values()), [ranks] if apart else []


def _columns(condition: Condition, observation: Observation) -> list[tuple[Longs, bool]]:
    """What the condition comes to on all ranks, for each thing that its sources may ask for; and whether more
    may come of that than is known."""
    ranks = np.arange(observation.world_size)
    meanings = [_meanings(observation, observation.sources[row]) for row in condition.sources]
    if not condition.text or not meanings or not all(meanings):
        return [(ranks, True)]
    columns = []
    for turn in range(max(map(len, meanings))):
        chosen = [fitting[turn % len(fitting)] for fitting in meanings]
        column = _worked_out(condition, chosen)
        columns += (
            [(meaning, True) for meaning in chosen] if column is None else [(column, condition.involved)]
        )
    return columns


def _meanings(observation: Observation, source: RankSource) -> list[Longs]:
    """What the source may tell each rank: all that fits what it told the captured ones."""
    ranks = np.arange(observation.world_size, dtype=np.int64)
    meanings = [ranks, ranks % observation.devices_per_host, ranks // observation.devices_per_host]
    meanings += [
        np.asarray(family.index(observation.world_size), np.int64) for family in observation.families
    ]
    fitting: list[Longs] = []
    for meaning in meanings:
        fits = all(meaning[rank] == value for rank, value in source.values.items())
        if fits and not any(np.array_equal(meaning, other) for other in fitting):
            fitting.append(meaning)
    return fitting


def _worked_out(condition: Condition, columns: list[Longs]) -> Longs | None:
    """The outcome on each rank as a number, equal where the outcomes are equal; None where it is involved."""
    import simpleeval  # only a program with conditions needs it

    evaluator = _evaluator(simpleeval)
    tree = evaluator.parse(condition.text)
    combined, inverse = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    numbers: dict[Any, int] = {}
    outcomes = np.zeros(len(combined), np.int64)
    for place, values in enumerate(combined.tolist()):
        evaluator.names = {f"v{i}": value for i, value in enumerate(values)}
        try:
            value = evaluator.eval(condition.text, tree)
            outcome = (type(value), repr(value))
        except (Involved, simpleeval.InvalidExpression):
            return None
        except Exception as error:
            outcome = (type(error), "")  # what the program would meet there, too
        outcomes[place] = numbers.setdefault(outcome, len(numbers))
    return outcomes[np.asarray(inverse).reshape(-1)]


def _evaluator(simpleeval: Any) -> Any:
    """Of Python's arithmetic and comparisons. Numbers are what they are equal to; powers may be too large."""
    operators = simpleeval.DEFAULT_OPERATORS | {ast.Is: operator.eq, ast.IsNot: operator.ne}
    del operators[ast.Pow]
    functions = (abs, all, any, bool, divmod, float, int, len, max, min, round, str, sum, frozenset)
    named = {function.__name__: function for function in functions} | {"range": _range, "hash": _hash}
    return simpleeval.EvalWithCompoundTypes(operators, named, allowed_attrs={dict: {"get"}})


def _range(*limits: int) -> range:
    numbers = range(*limits)
    if len(numbers) > LENGTH:
        raise Involved
    return numbers


def _hash(value: Any) -> int:
    """Of a number; that of a text differs from process to process."""
    if not isinstance(value, int):
        raise Involved
    return hash(value)


def stand_ins(observation: Observation, cells: CheckedCells) -> tuple[Longs, Longs]:
    """For every rank the captured one that stands for it, and the ranks that play a part for which none was
    captured: there the nearest one stands in."""
    captured = np.array(sorted(observation.captured), np.int64)
    stands = _corners(observation, cells)
    stands[captured] = captured
    unknown = np.flatnonzero(~np.isin(stands, captured))
    doubtful = unknown[:0]
    if len(unknown):
        stands[unknown], other_part = _nearest(observation.axes, observation.world_size, unknown, captured)
        doubtful = unknown[other_part]
    for rank, other in cells.alike.items():
        stands[rank] = other
    return stands, doubtful


def _corners(observation: Observation, cells: CheckedCells) -> Longs:
    """For every rank the one at the first corner of its cell, or itself."""
    if cells.starts is None:
        return np.arange(observation.world_size)
    axes = observation.axes
    starts = [np.array(places) for places in cells.starts]
    cell = np.zeros(observation.world_size, np.int64)
    for axis, places in zip(axes.axes, starts, strict=True):
        segment = np.searchsorted(places, axis.index, side="right") - 1
        cell = cell * len(places) + segment
    _, first, inverse = np.unique(cell, return_index=True, return_inverse=True)
    corners = []
    for rank in first.tolist():
        point = tuple(
            int(places[np.searchsorted(places, i, side="right") - 1])
            for places, i in zip(starts, axes.point(rank), strict=True)
        )
        corners.append(axes.rank(point))
    return np.array(corners, np.int64)[inverse]


def _nearest(
    axes: Axes, world_size: int, unknown: Longs, captured: Longs
) -> tuple[Longs, np.ndarray[Any, np.dtype[np.bool_]]]:
    """For each unknown rank the nearest captured one, and whether that one plays another part."""
    distance = np.zeros((len(unknown), len(captured)), np.int64)
    other_part = np.zeros(distance.shape, np.bool_)
    for axis in axes.axes:
        apart = np.abs(axis.index[unknown][:, None] - axis.index[captured][None, :])
        distance += apart * (world_size if axis.positional else 1)
        if axis.positional:
            other_part |= apart > 0
    nearest = np.argmin(distance, axis=1)
    return captured[nearest], other_part[np.arange(len(unknown)), nearest]
