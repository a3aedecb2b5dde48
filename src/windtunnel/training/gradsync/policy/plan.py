"""From a profile to a plan: cut the gradients into groups, give each an option, and say why.

Cuts and options depend on each other: what is compressed wants larger groups, and what hides behind backward
wants none. So several ways to cut are tried, the best for each uniform option among them, options are
searched on the most promising ones (`strategy`), neighbours that came to the same option are cut anew, and
what the timeline prices least is kept. All uniform choices are among the candidates, to leave gradients
as they are is the first of them, and it is taken unless the gain exceeds what the profile cannot tell.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, groupby, pairwise, product
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.errors import UserError
from windtunnel.training.gradsync.model import (
    NONE,
    PLAIN,
    GradientGroup,
    IterationForecast,
    Option,
    SyncPlan,
    SyncProfile,
)
from windtunnel.training.gradsync.policy.options import (
    BETWEEN,
    COMPUTE,
    ELEMENT,
    INSIDE,
    RESOURCES,
    GroupTask,
    options,
    paced,
    tasks,
    without_codec_cost,
)
from windtunnel.training.gradsync.policy.sparse import choices
from windtunnel.training.gradsync.policy.strategy import Affine, best_cuts, even_cuts, search, undominated
from windtunnel.training.gradsync.policy.timeline import Costs

Ints = NDArray[np.int64]
Cuts = tuple[int, ...]
Way = Callable[[int, list[float], list[int]], list[int]]
"""How to cut neighbours of one option: where groups end, by their backward and elements."""
BUCKETS = 25 * 2**20 // ELEMENT
"""Elements of DDP's buckets (``bucket_cap_mb=25``)."""
TRIED = 3
"""Ways to cut that options are searched on."""
ROUNDS = 3
HARDLY = 1e-3
"""Of an iteration: for less than that nothing is compressed."""
FUSED = 6
"""Options whose own best way to cut is tried, those that take least in DDP's buckets or alone."""


def make_plan(
    profile: SyncProfile, seed: int = 0, steps: Mapping[str, float] = MappingProxyType({})
) -> SyncPlan:
    """The plan found whose iteration takes least, with whatever codecs the profile has. ``steps``: that
    training needs with them to a loss, over those that it needs without (1 where it is not there).

    Raises:
        UserError: the profile has no gradients.
    """
    if not profile.tensors:
        raise UserError("profile: it has no tensors; a model with parameters that need gradients is accepted")
    job = _Job(profile, _worth(profile), steps)
    notes: tuple[str, ...] = ()
    doubt = 1 + max((collective.error for collective in profile.network.collectives), default=0.0)
    best = _gentlest(job, _Job(paced(profile, doubt), job.options) if doubt > 1 else job)
    if job.lossy(best) and doubt > 1:
        fast = _Job(paced(profile, 1 / doubt), job.options)
        if fast.fastest(0).seconds <= fast.priced(best.cuts, best.choice).seconds * (1 + HARDLY):
            notes = (
                f"nothing is compressed: the network may be {doubt - 1:.1%} faster than it is known to be, "
                "and then that would gain nothing",
            )
            best = job.fastest(0)
    free = without_codec_cost(profile)
    bound = min(_Job(free, _worth(free)).searched(cuts).seconds for cuts in (best.cuts, job.alone))
    compared = []
    for option, kind in enumerate(job.options):
        compared.append(job.forecast(f"{kind.words()} in DDP's buckets", job.uniform(option, job.buckets)))
        compared.append(job.forecast(f"{kind.words()} in its best groups", job.fastest(option)))
    plan = job.plan(best, compared)
    return replace(plan, bound=min(best.seconds, bound), seed=seed, notes=notes)


def uniform_plan(profile: SyncProfile, codec: str, most: float | None = None) -> SyncPlan:
    """Every dense gradient with one codec, by its best option, in groups of at most ``most`` elements or one
    gradient; None: in those that are best for it. What other plans are held against."""
    job = _Job(profile, [option for option in options(profile) if option.codec == codec])
    tried = product(range(len(job.options)), job.cuts if most is None else [job.evenly(most)])
    return job.plan(min((job.uniform(*case) for case in tried), key=_seconds), ())


def _worth(profile: SyncProfile) -> list[Option]:
    """The options, without those that no size of this job would choose; plain first."""
    every = list(options(profile))
    total = sum(tensor.numel for tensor in profile.tensors if tensor.sparsity is None)
    places = {0}
    for size in {max(1, total >> shift) for shift in (0, 2, 4, 7, 10, 14)}:
        places.update(undominated([tasks(option, size, profile) for option in every]))
    return [every[place] for place in sorted(places)]


def _gentlest(job: _Job, slow: _Job) -> _Candidate:
    """The best choice, with less compression wherever that makes the iteration hardly longer even where the
    network is as slow as it may be (``slow``): an error in the gradients that buys nothing is left out."""
    best = job.best()
    alike = [slow.uniform(option, cuts) for option in range(len(slow.options)) for cuts in slow.cuts]
    alike.insert(0, slow.priced(best.cuts, best.choice))
    most = min(map(_seconds, alike)) * (1 + HARDLY)
    candidate = min((other for other in alike if other.seconds <= most), key=slow.lost)
    choice = np.array(candidate.choice, np.int64)
    ranked = sorted(range(len(slow.options)), key=slow.loss)
    for group, (begin, _) in enumerate(spans(candidate.cuts)):
        if begin in slow.sparse:
            continue
        current = choice[group]
        for option in ranked[: ranked.index(int(current))]:
            choice[group] = option
            if slow.of(candidate.cuts, choice).iteration(choice) <= most:
                break
            choice[group] = current
    gentle = slow.priced(candidate.cuts, choice)
    # each gradient's option in other groups, none of which crosses from one option to another
    cuts = slow.cut(slow.fused, gentle)
    fewer = slow.priced(cuts, [gentle.choice[bisect_left(gentle.cuts, end)] for end in cuts])
    if fewer.seconds <= most and len(cuts) < len(gentle.cuts):
        gentle = fewer
    return job.priced(gentle.cuts, gentle.choice)


def spans(cuts: Cuts) -> list[tuple[int, int]]:
    """First gradient and end of each group."""
    return [*pairwise((0, *cuts))]


@dataclass(frozen=True)
class _Candidate:
    """A way to cut (where groups end), the number of each group's option, and what it takes."""

    cuts: Cuts
    choice: tuple[int, ...]
    seconds: float


class _Job:
    """A profile with what its ``options`` cost, worked out once for each size."""

    def __init__(
        self,
        profile: SyncProfile,
        allowed: Sequence[Option],
        steps: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self.profile, self.tensors, self.options = profile, profile.tensors, list(allowed)
        self.steps = steps
        self.sparse = {
            # what takes least by itself first
            place: sorted(
                choices(tensor.name, rows, profile.network),
                key=lambda way: sum(task.seconds for task in way[1]),
            )
            for place, tensor in enumerate(self.tensors)
            if (rows := tensor.sparsity) is not None
        }
        self._sums = {place: [work for _, work in ways] for place, ways in self.sparse.items()}
        self._until = [*accumulate((tensor.numel for tensor in self.tensors), initial=0)]
        self._of_size = cache(lambda numel: [tasks(option, numel, profile) for option in self.options])
        self.costs, self.uniform = cache(self._costs), cache(self._uniform)

    # -- what a group may do

    def numel(self, begin: int, end: int) -> int:
        return self._until[end] - self._until[begin]

    def work(self, begin: int, end: int) -> list[list[GroupTask]]:
        """The tasks of each option of a group."""
        return self._sums[begin] if begin in self.sparse else self._of_size(self.numel(begin, end))

    def option(self, begin: int, place: int) -> Option:
        return self.sparse[begin][place][0] if begin in self.sparse else self.options[place]

    def chosen(self, candidate: _Candidate) -> list[tuple[Option, list[GroupTask]]]:
        """Of each group."""
        rows = zip(spans(candidate.cuts), candidate.choice, strict=True)
        return [(self.option(begin, place), self.work(begin, end)[place]) for (begin, end), place in rows]

    def lossy(self, candidate: _Candidate) -> bool:
        return any(option.scheme != "sparse" and option.codec != NONE for option, _ in self.chosen(candidate))

    def loss(self, option: int) -> tuple[float, int]:
        """By how little of a gradient is kept; of equal ones the simpler option."""
        cost = self.profile.cost(self.options[option].codec)
        share = 1.0 if cost is None else cost.at(1 << 20).nbytes / (ELEMENT << 20)
        return -share, option

    def lost(self, candidate: _Candidate) -> tuple[float, int]:
        """Of all gradients, what is not kept; then the number of groups, each of which is a call more."""
        rows = zip(spans(candidate.cuts), candidate.choice, strict=True)
        losses = (
            self.loss(option)[0] * self.numel(*span) for span, option in rows if span[0] not in self.sparse
        )
        return sum(losses), len(candidate.cuts)

    # -- what choices take

    def _costs(self, cuts: Cuts, own: bool) -> Costs:
        """Of all options of the groups. ``own``: DDP sums gradients as they are itself, nothing is handed
        over."""
        handing = 0.0 if own else self.profile.handing
        backward = [
            sum(tensor.backward for tensor in self.tensors[first:end]) + handing for first, end in spans(cuts)
        ]
        alternatives = [self.work(*span) for span in spans(cuts)]
        return Costs.of(alternatives, backward, self.profile.forward, self.profile.after)

    def of(self, cuts: Cuts, choice: Ints) -> Costs:
        """The costs that ``choice`` is priced by."""
        return self.costs(cuts, not self.sparse and self.options[0] == PLAIN and not choice.any())

    def priced(self, cuts: Cuts, choice: Sequence[int] | Ints) -> _Candidate:
        chosen = np.array(choice, np.int64)
        return _Candidate(cuts, tuple(chosen.tolist()), self.of(cuts, chosen).iteration(chosen))

    def _uniform(self, option: int, cuts: Cuts) -> _Candidate:
        """Every dense group has ``option``, every sparse one what takes least by itself."""
        return self.priced(cuts, [0 if begin in self.sparse else option for begin in (0, *cuts[:-1])])

    def fastest(self, option: int) -> _Candidate:
        return min((self.uniform(option, cuts) for cuts in self.cuts), key=_seconds)

    def searched(self, cuts: Cuts) -> _Candidate:
        starts = [np.array(self.uniform(option, cuts).choice) for option in range(len(self.options))]
        return self.priced(
            cuts, search(self.costs(cuts, False), [self.numel(*span) for span in spans(cuts)], starts)
        )

    def best(self) -> _Candidate:
        """Searched on the ways to cut whose best uniform option takes least, and cut anew until that helps no
        more."""
        every = range(len(self.options))
        ranked = sorted(
            self.cuts, key=lambda cuts: min(self.uniform(option, cuts).seconds for option in every)
        )
        candidate = min((self.searched(cuts) for cuts in ranked[:TRIED]), key=_seconds)
        for _ in range(ROUNDS):
            cuts = self.cut(self.fused, candidate)
            if cuts == candidate.cuts or (again := self.searched(cuts)).seconds >= candidate.seconds * (
                1 - 1e-9
            ):
                break
            candidate = again
        return candidate

    # -- ways to cut

    @property
    def alone(self) -> Cuts:
        return tuple(range(1, len(self.tensors) + 1))

    @cached_property
    def buckets(self) -> Cuts:
        return self.evenly(BUCKETS)

    def evenly(self, most: float) -> Cuts:
        return self.cut(lambda _, backward, numels: even_cuts(numels, most))

    @cached_property
    def cuts(self) -> list[Cuts]:
        """Every gradient by itself, DDP's buckets, and the best for each of some options."""
        simple = (self.alone, self.buckets)
        every = range(len(self.options))
        ranked = sorted(every, key=lambda option: min(self.uniform(option, cuts).seconds for cuts in simple))
        fused = [
            self.cut(self.fused, self.uniform(fromkey, self.alone))
            for fromkey in dict.fromkeys((0, *ranked[:FUSED]))
        ]
        return list(dict.fromkeys((*simple, *fused)))

    def cut(self, way: Way, candidate: _Candidate | None = None) -> Cuts:
        """Each run of neighbours that have one option in ``candidate`` (None: all of them) is cut by itself;
        a sparse gradient is a group of its own."""
        candidate = candidate or self.uniform(0, self.alone)
        ends: list[int] = []
        done = 0
        rows = zip((0, *candidate.cuts), candidate.cuts, candidate.choice, strict=False)
        for (sparse, option), members in groupby(rows, key=lambda row: (row[0] in self.sparse, row[2])):
            groups = [*members]
            first, last = groups[0][0], groups[-1][1]
            if sparse:
                ends += [end for _, end, _ in groups]
                continue
            backward = [tensor.backward for tensor in self.tensors[first:last]]
            # what sparse gradients before it take is backward of the run, too
            backward[0] += sum(tensor.backward for tensor in self.tensors[done:first])
            ends += [
                first + end
                for end in way(option, backward, [tensor.numel for tensor in self.tensors[first:last]])
            ]
            done = last
        return tuple(ends)

    def fused(self, option: int, backward: list[float], numels: list[int]) -> list[int]:
        """The best way for one option."""
        encode = self._affine(option, (COMPUTE,))
        if self.options[option] != PLAIN:
            encode = encode._replace(fixed=encode.fixed + self.profile.handing)
        return best_cuts(backward, numels, encode, self._affine(option, (INSIDE, BETWEEN)))[1]

    def _affine(self, option: int, resources: tuple[int, ...]) -> Affine:
        """What an option takes of resources, as a line through a small and a large group."""
        total = self._until[-1]
        small, large = max(1, total // 2000), max(2, total // 4)

        def resource_seconds(numel: int) -> float:
            return sum(task.seconds for task in self._of_size(numel)[option] if task.resource in resources)

        rate = max(0.0, (resource_seconds(large) - resource_seconds(small)) / max(1, large - small))
        return Affine(max(0.0, resource_seconds(small) - rate * small), rate)

    # -- what is told of a choice

    def plan(self, candidate: _Candidate, compared: Sequence[IterationForecast]) -> SyncPlan:
        network = self.profile.network
        return SyncPlan(
            groups=tuple(self._groups(candidate)), order=self._order(candidate),
            forecasts=(self.forecast("plan", candidate), *compared), bound=candidate.seconds,
            world=network.world, hosts=network.hosts, emulated=self.profile.emulated,
            numel=sum(tensor.numel for tensor in self.tensors),
        )  # fmt: skip

    def forecast(self, name: str, candidate: _Candidate) -> IterationForecast:
        chosen = self.chosen(candidate)
        # what a part of the gradients costs is not known: they are priced as if all had the worst codec
        steps = max(self.steps.get(option.codec, 1.0) for option, _ in chosen)
        sent = round(sum(task.sent for _, work in chosen for task in work))
        return IterationForecast(name, candidate.seconds, sent, steps)

    def _order(self, candidate: _Candidate) -> tuple[tuple[int, int], ...]:
        """The collectives by when the timeline begins them."""
        choice = np.array(candidate.choice, np.int64)
        _, times = self.of(candidate.cuts, choice).schedule(choice)
        calls = [
            (times[group, step + 1, 0], group, step)
            for group, (_, work) in enumerate(self.chosen(candidate))
            for step, task in enumerate(work)
            if task.resource in (INSIDE, BETWEEN)
        ]
        return tuple((group, step) for _, group, step in sorted(calls))

    def _groups(self, candidate: _Candidate) -> Iterator[GradientGroup]:
        """With the reason of each: what the iteration would take with its next best option."""
        rows = zip(spans(candidate.cuts), self.chosen(candidate), strict=True)
        for group, ((begin, end), (option, work)) in enumerate(rows):
            names = tuple(tensor.name for tensor in self.tensors[begin:end])
            yield GradientGroup(names, option, self._reason(candidate, group, begin, work))

    def _reason(self, candidate: _Candidate, group: int, begin: int, work: list[GroupTask]) -> str:
        choice = np.array(candidate.choice, np.int64)
        others: list[tuple[float, int]] = []
        for option in range(len(self.sparse.get(begin, self.options))):
            if option != candidate.choice[group]:
                choice[group] = option
                others.append((self.of(candidate.cuts, choice).iteration(choice), option))
        if not others:
            return "the only option"
        seconds, place = min(others)
        words = self.option(begin, place).words()
        mine = [0.0] * len(RESOURCES)
        for task in work:
            mine[task.resource] += task.seconds
        spent = ", ".join(
            f"{share * 1e3:.3g} ms {name}" for share, name in zip(mine, RESOURCES, strict=True) if share
        )
        if seconds <= candidate.seconds * (1 + 1e-6):
            return f"hidden behind other work ({spent}); {words} would take as long"
        longer = (seconds - candidate.seconds) * 1e3
        return f"{spent}; the iteration would be {longer:.3g} ms longer with {words}"


def _seconds(candidate: _Candidate) -> float:
    return candidate.seconds
