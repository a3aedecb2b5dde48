"""From a profile to a plan: cut the gradients into groups, give each an option, and say why.

Cuts and options depend on each other: what is compressed wants larger groups, and what hides behind backward
wants none. So several ways to cut are tried, the best for each uniform option among them (`fusion`), options
are searched on the most promising ones (`strategy`), neighbours that came to the same option are cut anew,
and what the timeline prices least is kept. All uniform choices are among the candidates, to leave gradients
as they are is the first of them, and it is taken unless the gain exceeds what the profile cannot tell.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, groupby

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.errors import UserError
from windtunnel.training.gradsync.model import NONE, Forecast, Group, Option, Plan, Profile
from windtunnel.training.gradsync.policy.fusion import Affine, best_cuts, even_cuts
from windtunnel.training.gradsync.policy.options import (
    BETWEEN,
    COMPUTE,
    ELEMENT,
    INSIDE,
    RESOURCES,
    Task,
    options,
    tasks,
    without_codec_cost,
)
from windtunnel.training.gradsync.policy.sparse import choices
from windtunnel.training.gradsync.policy.strategy import search, undominated
from windtunnel.training.gradsync.policy.timeline import Costs

Ints = NDArray[np.int64]
Cuts = tuple[int, ...]
BUCKETS = 25 * 2**20 // ELEMENT
"""Elements of DDP's buckets (``bucket_cap_mb=25``)."""
TRIED = 3
"""Ways to cut that options are searched on."""
ROUNDS = 3
HARDLY = 1e-3
"""Of an iteration: for less than that nothing is compressed."""
FUSED = 6
"""Options whose own best way to cut is tried, those that take least in DDP's buckets or alone."""


def make_plan(profile: Profile, codecs: Sequence[str] = (), seed: int = 0) -> Plan:
    """The best plan found. ``codecs``: those that may be used; all of the profile where it is empty.

    Raises:
        UserError: a codec that the profile has no cost of, or no gradients.
    """
    if not profile.tensors:
        raise UserError("profile: it has no tensors; a model with parameters that need gradients is accepted")
    known = sorted({cost.codec for cost in profile.codecs})
    for name in codecs:
        if name not in known:
            raise UserError(f"--codec {name}: the profile has no cost of it; it has {', '.join(known)}")
    if codecs:
        profile = replace(profile, codecs=tuple(one for one in profile.codecs if one.codec in codecs))
    job = _Job(profile)
    found, notes = job.gentlest(job.best()), []
    plain = min((job.uniform(0, cuts) for cuts in job.cuts), key=lambda one: one.seconds)
    doubt = max((one.error for one in profile.network.collectives), default=0.0)
    gain = plain.seconds / found.seconds - 1
    if gain <= doubt and job.lossy(found):
        notes.append(
            f"nothing is compressed: that is predicted to gain {gain:.1%}, and the times of the network are "
            f"known to {doubt:.1%} only"
        )
        found = plain
    return Plan(
        groups=tuple(job.groups(found)), order=job.order(found),
        forecasts=(job.forecast("plan", found), *job.compared()),
        bound=min(found.seconds, job.bound(found)), world=profile.network.world,
        hosts=profile.network.hosts, seed=seed, emulated=profile.emulated, notes=tuple(notes),
    )  # fmt: skip


def uniform_plan(profile: Profile, option: Option, most: float | None = None) -> Plan:
    """Every dense gradient with one option, in groups of at most ``most`` elements or one gradient; None: in
    those that are best for it. What other plans are held against."""
    job = _Job(profile, [option])
    tried = job.cuts if most is None else [job._cut_runs(lambda numels, _: even_cuts(numels, most))]
    found = min((job.uniform(0, cuts) for cuts in tried), key=lambda one: one.seconds)
    return Plan(
        groups=tuple(job.groups(found)), order=job.order(found), forecasts=(job.forecast("plan", found),),
        bound=found.seconds, world=profile.network.world, hosts=profile.network.hosts,
        emulated=profile.emulated,
    )  # fmt: skip


@dataclass(frozen=True)
class _Found:
    """A way to cut (where groups end), the number of each group's option, and what it takes."""

    cuts: Cuts
    choice: tuple[int, ...]
    seconds: float


class _Job:
    """A profile with what its options cost, worked out once for each size."""

    def __init__(self, profile: Profile, allowed: Sequence[Option] = ()) -> None:
        self.profile = profile
        self.tensors = profile.tensors
        self._every = list(allowed) or list(options(profile))
        self._by_size: dict[int, list[list[Task]]] = {}
        self._sparse = {
            place: choices(one, profile) for place, one in enumerate(self.tensors) if one.width > 0
        }
        total = sum(one.numel for place, one in enumerate(self.tensors) if place not in self._sparse)
        # what no size of this job would choose is not tried at any
        sizes = {max(1, total), *(max(1, total >> shift) for shift in (2, 4, 7, 10, 14))}
        kept = {0}
        for size in sizes:
            kept.update(undominated([tasks(one, size, profile) for one in self._every]))
        self.options = [self._every[place] for place in sorted(kept)]

    def of_size(self, numel: int) -> list[list[Task]]:
        """The tasks of each option for so many elements."""
        if numel not in self._by_size:
            self._by_size[numel] = [tasks(one, numel, self.profile) for one in self.options]
        return self._by_size[numel]

    @property
    def alone(self) -> Cuts:
        return tuple(range(1, len(self.tensors) + 1))

    @cached_property
    def cuts(self) -> list[Cuts]:
        """Ways to cut: every gradient by itself, DDP's buckets, and the best for each option."""
        found = [
            self.alone,
            self._cut_runs(lambda numels, _: even_cuts(numels, BUCKETS)),
        ]
        ranked = sorted(
            range(len(self.options)), key=lambda one: min(self.uniform(one, cuts).seconds for cuts in found)
        )
        for option in dict.fromkeys([0, *ranked[:FUSED]]):
            found.append(self._cut_runs(partial(self._fused, option)))
        return list(dict.fromkeys(found))

    def _cut_runs(self, cut: Callable[[list[int], list[float]], list[int]]) -> Cuts:
        """Cut each run of dense gradients by itself; a sparse one is a group of its own."""
        ends: list[int] = []
        begin = 0
        for sparse, places in groupby(range(len(self.tensors)), key=lambda place: place in self._sparse):
            run = list(places)
            if sparse:
                ends += [place + 1 for place in run]
            else:
                backward = [self.tensors[place].backward for place in run]
                # what sparse gradients before it take is backward of the run, too
                backward[0] += sum(self.tensors[place].backward for place in range(begin, run[0]))
                numels = [self.tensors[place].numel for place in run]
                ends += [run[0] + end for end in cut(numels, backward)]
            begin = run[-1] + 1
        return tuple(ends)

    def _fused(self, option: int, numels: list[int], backward: list[float]) -> list[int]:
        return best_cuts(
            backward, numels, self._affine(option, (COMPUTE,)), self._affine(option, (INSIDE, BETWEEN))
        )[1]  # fmt: skip

    def _affine(self, option: int, resources: tuple[int, ...]) -> Affine:
        """What an option takes of resources, as a line through a small and a large group."""
        total = sum(one.numel for one in self.tensors)
        small, large = max(1, total // 2000), max(2, total // 4)

        def taken(numel: int) -> float:
            found = tasks(self.options[option], numel, self.profile)
            return sum(task.seconds for task in found if task.resource in resources)

        rate = max(0.0, (taken(large) - taken(small)) / max(1, large - small))
        return Affine(max(0.0, taken(small) - rate * small), rate)

    def costs(self, cuts: Cuts) -> Costs:
        """Of all options of the groups."""
        found, backward, begin = [], [], 0
        for end in cuts:
            found.append(
                [one for _, one in self._sparse[begin]]
                if begin in self._sparse
                else self.of_size(self.numel(begin, end))
            )
            backward.append(sum(one.backward for one in self.tensors[begin:end]))
            begin = end
        return Costs.of(found, backward, self.profile.forward, self.profile.after)

    def numel(self, begin: int, end: int) -> int:
        return self._until[end] - self._until[begin]

    @cached_property
    def _until(self) -> list[int]:
        return [*accumulate((one.numel for one in self.tensors), initial=0)]

    def numels(self, cuts: Cuts) -> list[int]:
        return [self.numel(begin, end) for begin, end in zip((0, *cuts[:-1]), cuts, strict=True)]

    def _start(self, costs: Costs, cuts: Cuts, option: int) -> Ints:
        """Every dense group has ``option``, every sparse one what takes least by itself."""
        chosen = np.full(len(cuts), option, np.int64)
        for place, begin in enumerate((0, *cuts[:-1]) if self._sparse else ()):
            if begin in self._sparse:
                alone = costs.seconds[place, : costs.options[place]].sum(axis=1)
                chosen[place] = int(np.argmin(alone))
        return chosen

    def uniform(self, option: int, cuts: Cuts) -> _Found:
        if (found := self._uniform.get((option, cuts))) is None:
            costs = self._costs(cuts)
            choice = self._start(costs, cuts, option)
            found = _Found(cuts, tuple(choice.tolist()), costs.iteration(choice))
            self._uniform[option, cuts] = found
        return found

    @cached_property
    def _uniform(self) -> dict[tuple[int, Cuts], _Found]:
        return {}

    def _costs(self, cuts: Cuts) -> Costs:
        if cuts not in self._known:
            self._known[cuts] = self.costs(cuts)
        return self._known[cuts]

    @cached_property
    def _known(self) -> dict[Cuts, Costs]:
        return {}

    def _searched(self, cuts: Cuts) -> _Found:
        costs = self._costs(cuts)
        starts = [self._start(costs, cuts, option) for option in range(len(self.options))]
        choice = search(costs, self.numels(cuts), starts)
        return _Found(cuts, tuple(choice.tolist()), costs.iteration(choice))

    def best(self) -> _Found:
        """Searched on the ways to cut whose best uniform option takes least, and cut anew until that helps no
        more."""
        every = range(len(self.options))
        ranked = sorted(self.cuts, key=lambda cuts: min(self.uniform(one, cuts).seconds for one in every))
        found = min((self._searched(cuts) for cuts in ranked[:TRIED]), key=lambda one: one.seconds)
        for _ in range(ROUNDS):
            cuts = self._cut_anew(found)
            if cuts == found.cuts:
                break
            again = self._searched(cuts)
            if again.seconds >= found.seconds * (1 - 1e-9):
                break
            found = again
        return found

    def gentlest(self, found: _Found) -> _Found:
        """The same with less compression wherever that makes the iteration hardly longer: an error in the
        gradients that buys nothing is left out."""
        most = found.seconds * (1 + HARDLY)
        alike = [self.uniform(one, cuts) for one in range(len(self.options)) for cuts in self.cuts]
        found = min([found, *(one for one in alike if one.seconds <= most)], key=self._lost)
        costs = self._costs(found.cuts)
        choice = np.array(found.choice, np.int64)
        begins = (0, *found.cuts[:-1])
        ranked = sorted(range(len(self.options)), key=self._loss)
        for group, begin in enumerate(begins):
            if begin in self._sparse:
                continue
            taken = choice[group]
            for option in ranked[: ranked.index(int(taken))]:
                choice[group] = option
                if costs.iteration(choice) <= most:
                    break
                choice[group] = taken
        gentle = _Found(found.cuts, tuple(choice.tolist()), costs.iteration(choice))
        fewer = self._same_in(gentle, self._cut_anew(gentle))
        return fewer if fewer.seconds <= most and len(fewer.cuts) < len(gentle.cuts) else gentle

    def _same_in(self, found: _Found, cuts: Cuts) -> _Found:
        """Each gradient's option in other groups, none of which crosses from one option to another."""
        option = dict(zip(found.cuts, found.choice, strict=True))
        ends = sorted(option)
        choice = tuple(option[ends[bisect_left(ends, end)]] for end in cuts)
        return _Found(cuts, choice, self._costs(cuts).iteration(np.array(choice, np.int64)))

    def _lost(self, found: _Found) -> tuple[float, int]:
        """Of all gradients, what is not kept; then the number of groups, each of which is a call more."""
        numels = self.numels(found.cuts)
        kept = [
            0.0 if begin in self._sparse else self._loss(option)[0]
            for begin, option in zip((0, *found.cuts[:-1]), found.choice, strict=True)
        ]
        return sum(one * numel for one, numel in zip(kept, numels, strict=True)), len(found.cuts)

    def _loss(self, option: int) -> tuple[float, int]:
        """By how little of a gradient is kept; of equal ones the simpler option."""
        cost = self.profile.cost(self.options[option].codec, self.options[option].device)
        kept = 1.0 if cost is None or cost.lossless else cost.at(1 << 20).nbytes / (ELEMENT << 20)
        return -kept, option

    def bound(self, found: _Found) -> float:
        """Seconds where codecs took none, cut as ``found`` and by single gradients."""
        free = _Job(without_codec_cost(self.profile))
        return min(free._searched(cuts).seconds for cuts in (found.cuts, self.alone))

    def _cut_anew(self, found: _Found) -> Cuts:
        """Each run of neighbours with one option is cut as is best for it."""
        ends: list[int] = []
        begins = (0, *found.cuts[:-1])
        rows = zip(begins, found.cuts, found.choice, strict=True)
        for (sparse, option), members in groupby(rows, key=lambda row: (row[0] in self._sparse, row[2])):
            spans = [(begin, end) for begin, end, _ in members]
            first, last = spans[0][0], spans[-1][1]
            if sparse:
                ends += [end for _, end in spans]
                continue
            run = self.tensors[first:last]
            cut = self._fused(option, [one.numel for one in run], [one.backward for one in run])
            ends += [first + end for end in cut]
        return tuple(ends)

    def option(self, found: _Found, group: int) -> Option:
        begin = (0, *found.cuts)[group]
        place = found.choice[group]
        return self._sparse[begin][place][0] if begin in self._sparse else self.options[place]

    def lossy(self, found: _Found) -> bool:
        lossless = {cost.codec for cost in self.profile.codecs if cost.lossless} | {NONE}
        used = (self.option(found, group) for group in range(len(found.cuts)))
        return any(one.scheme != "sparse" and one.codec not in lossless for one in used)

    def compared(self) -> list[Forecast]:
        """Every option alone, in the buckets of DDP and in the groups that are best for it."""
        forecasts = []
        buckets = self.cuts[1] if len(self.cuts) > 1 else self.cuts[0]
        for option, one in enumerate(self.options):
            forecasts.append(self.forecast(f"{one.words()} in DDP's buckets", self.uniform(option, buckets)))
            fused = min((self.uniform(option, cuts) for cuts in self.cuts), key=lambda found: found.seconds)
            forecasts.append(self.forecast(f"{one.words()} in its best groups", fused))
        return forecasts

    def forecast(self, name: str, found: _Found) -> Forecast:
        sent = sum(task.sent for group in range(len(found.cuts)) for task in self._tasks(found, group))
        return Forecast(name, found.seconds, round(sent))

    def _tasks(self, found: _Found, group: int) -> list[Task]:
        begin, end, place = (0, *found.cuts)[group], found.cuts[group], found.choice[group]
        return (
            self._sparse[begin][place][1]
            if begin in self._sparse
            else self.of_size(self.numel(begin, end))[place]
        )

    def order(self, found: _Found) -> tuple[tuple[int, int], ...]:
        """The collectives by when the timeline begins them."""
        _, times = self._costs(found.cuts).schedule(np.array(found.choice, np.int64))
        calls = [
            (times[group, step + 1, 0], group, step)
            for group in range(len(found.cuts))
            for step, task in enumerate(self._tasks(found, group))
            if task.resource in (INSIDE, BETWEEN)
        ]
        return tuple((group, step) for _, group, step in sorted(calls))

    def groups(self, found: _Found) -> list[Group]:
        """With the reason of each: what the iteration would take with its next best option."""
        costs = self._costs(found.cuts)
        made, begin = [], 0
        for group, end in enumerate(found.cuts):
            names = tuple(one.name for one in self.tensors[begin:end])
            made.append(Group(names, self.option(found, group), self._reason(found, costs, group)))
            begin = end
        return made

    def _reason(self, found: _Found, costs: Costs, group: int) -> str:
        choice = np.array(found.choice, np.int64)
        others: list[tuple[float, int]] = []
        for option in range(int(costs.options[group])):
            if option != found.choice[group]:
                choice[group] = option
                others.append((costs.iteration(choice), option))
        if not others:
            return "the only option"
        seconds, place = min(others)
        other = self.option(
            replace(found, choice=(*found.choice[:group], place, *found.choice[group + 1 :])), group
        )
        mine = [0.0] * len(RESOURCES)
        for task in self._tasks(found, group):
            mine[task.resource] += task.seconds
        spent = ", ".join(
            f"{one * 1e3:.3g} ms {name}" for one, name in zip(mine, RESOURCES, strict=True) if one
        )
        longer = (seconds - found.seconds) * 1e3
        if longer <= 1e-6 * found.seconds * 1e3:
            return f"hidden behind other work ({spent}); {other.words()} would take as long"
        return f"{spent}; the iteration would be {longer:.3g} ms longer with {other.words()}"
