"""The engine's scheduler: pure bookkeeping of requests from step to step, the same one live and in the twin.

``arrive`` and ``cancel`` whenever it happens; then ``next(now)`` for a step and ``done(step, now)`` when it
has been taken. The rules are `engine.policy` (admission, prefill) and `branching.policy` (extra branches).
What a caller who holds tensors must know:

- A request is a trunk (unit 0) and the branches of its parallel stages (units 1, 2, … through all stages).
  All positions are absolute: a branch continues the trunk's.
- A unit's first token comes from the prefill chunk that ends it (`Chunk.samples`), each further one from a
  row. A row feeds the unit's last token. The last token of a unit is in no KV.
- A fork (`Step.forks`) happens where all of the trunk but its last known token is in the KV. Every branch
  begins with that token and its own head, so it always has something to prefill.
- A join (`Step.joins`) drops the branches' KV; the trunk then goes on, from where it was forked, with the
  tokens of all branches (heads and decoded) and the stage's ``join`` tokens, prefilled.
- In one step joins come first, then forks, prefill chunks and rows.

`Step.repeat` steps with the same rows may be taken at once (``done(..., count=n)``) if nobody arrives and
none begins after `Step.until`: the outcome is that of single steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from heapq import heappop, heappush
from itertools import chain, islice
from math import inf
from typing import Any

from windtunnel.serving.branching import policy as branching
from windtunnel.serving.engine import policy as admission
from windtunnel.serving.engine.model import Parallel, Request, Serial, Stage, StepTime
from windtunnel.serving.engine.policy.step import Chunk, Depths, Finished, Limits, Outcome, Step, Unit

ALWAYS = branching.ALWAYS
PATIENCE = 16
"""Tokens that another branch must have left more before it becomes the protected one."""
LOOK = 16
"""Waiting requests that one decision sees at most."""

Candidates = tuple[branching.Candidate, ...]
Log = Callable[[str, str, object, object], None]
"""(capability, policy, observation, decision)"""


class _Branch:
    """``head``: tokens to prefill, the trunk's last one first; ``suffix``: tokens of its own in the KV;
    ``left``: tokens that it may still decode. It is ``live`` from its first token on."""

    __slots__ = ("head", "left", "live", "suffix", "unit")

    def __init__(self, unit: int, head: int, left: int) -> None:
        self.unit, self.head, self.left = unit, head, left
        self.suffix, self.live = 0, False


class _Running:
    """An admitted request. ``held``: tokens of the trunk in the KV, ``known``: tokens of the trunk;
    ``tail``: those of this stage's branches that have ended; ``path`` and ``beside``: tokens at most of the
    stages to come, one after another and beside those; ``emitted``: tokens, ``steps``: those after the first
    token in which it got on, the last of them ``stamp``. While the trunk decodes, counts are those of when it
    began, at step ``began``."""

    __slots__ = (
        "admitted", "began", "beside", "branches", "emitted", "first", "held", "known", "path", "protected",
        "request", "reserve", "stage", "stamp", "steps", "stops", "tail", "units",
    )  # fmt: skip

    def __init__(self, request: Request, cached: int, stops: Depths, reserve: int, now: float) -> None:
        self.request, self.stops, self.reserve, self.admitted = request, stops, reserve, now
        self.held, self.known = cached, request.prompt
        self.first = inf
        self.path, self.beside = map(sum, zip(*map(_size, request.stages), strict=True))
        self.stage = self.emitted = self.steps = self.units = self.protected = self.tail = self.stamp = 0
        self.began = -1
        self.branches: dict[int, _Branch] = {}


def _size(stage: Stage) -> tuple[int, int]:
    """Tokens that it decodes one after another at most, and beside those."""
    if isinstance(stage, Serial):
        return stage.tokens, 0
    return max(stage.tokens), sum(stage.tokens) - max(stage.tokens)


def _stop(stops: Depths, begin: int, end: int) -> int:
    """How far one chunk may go from ``begin``."""
    return min((at for at in stops if begin < at < end), default=end)


class Scheduler:
    """See the module. ``lookup`` says of a request that might be admitted now how many tokens of its prompt
    a cache holds, and at which depths its prefill has to stop, ascending; else it is ``request.cached`` and
    nowhere. ``own``: a user's policies by capability, in place of those that ``limits`` names."""

    def __init__(
        self,
        limits: Limits,
        time: StepTime,
        *,
        lookup: Callable[[Request], tuple[int, Depths]] | None = None,
        log: Log | None = None,
        own: Mapping[str, Callable[[Any], Any]] = {},
    ) -> None:
        self.limits, self.time = limits, time
        self.predictor = branching.Predictor()
        self._lookup, self._log = lookup, log
        self._admit = own.get("serving.engine") or admission.POLICIES[limits.admission]
        self._extend = own.get("serving.branching") or branching.POLICIES[limits.branching]
        self._waiting: deque[tuple[Request, admission.Waiting]] = deque()
        self._deferred: deque[tuple[Request, admission.Waiting]] = deque()  # late ones, behind all others
        self._found: dict[int, tuple[int, Depths]] = {}  # what `lookup` said in this step
        self._running: dict[int, _Running] = {}
        self._serial: dict[int, _Running] = {}  # whose trunk decodes
        self._parallel: dict[int, _Running] = {}  # with branches that decode
        self._urgent: dict[Unit, None] = {}  # to be prefilled: what running requests wait for
        self._filling: dict[Unit, None] = {}  # and prompts
        self._forks: dict[int, tuple[int, ...]] = {}
        self._joins: list[int] = []
        self._ends: list[tuple[int, int, int]] = []  # heap: step at which a trunk ends, request, began
        self._rows: tuple[Unit, ...] | None = ()  # of `_serial`
        self._steps = self._read = self._backlog = 0
        self.reserved = 0
        """KV tokens that the admitted requests may come to hold."""

    # what comes from outside

    def most(self, request: Request) -> int:
        """KV tokens that it may come to hold, with its units' states."""
        units = max((len(one.heads) for one in request.stages if isinstance(one, Parallel)), default=0)
        return request.most + (1 + units) * self.limits.state

    def arrive(self, request: Request, again: bool = False) -> bool:
        """Whether it was taken into the queue; not if that is full, unless it comes ``again``.

        Raises:
            ValueError: it has no tokens to read or to write, or can never fit.
        """
        sizes = [(one.tokens,) if isinstance(one, Serial) else one.tokens for one in request.stages]
        if request.prompt <= request.cached or not sizes or min(min(one, default=0) for one in sizes) < 1:
            raise ValueError(
                "a request needs a token of prompt that is not cached, and units that decode one"
            )
        if (most := self.most(request)) > (kv := self.limits.kv):
            raise ValueError(f"the request may come to hold {most} tokens of KV, there is room for {kv}")
        if self.waiting >= self.limits.queue and not again:
            return False
        due = request.arrival + request.objective.ttft
        self._waiting.append((request, self._as_waiting(request, request.cached, (), due)))
        return True

    def cancel(self, request: int) -> None:
        """It is done with, wherever it stands, also in a step that has begun."""
        one = self._running.get(request)
        if one is not None:
            self._leave(one)
            return
        for queue in (self._waiting, self._deferred):
            for at, (waiting, _) in enumerate(queue):
                if waiting.id == request:
                    del queue[at]
                    return

    @property
    def waiting(self) -> int:
        """Requests that are not admitted."""
        return len(self._waiting) + len(self._deferred)

    @property
    def running(self) -> int:
        """Requests that are admitted."""
        return len(self._running)

    def held(self) -> int:
        """KV tokens that the admitted requests hold now, with what a cache lent them."""
        total = self._read
        for one in self._running.values():
            if one.began < 0:
                total += one.held + one.tail + sum(branch.suffix for branch in one.branches.values())
        return total

    # a step

    def next(self, now: float) -> Step | None:
        """The step to take now; None if there is nothing to do. It may have refusals only (`Step.work`)."""
        admitted: tuple[int, ...] = ()
        refused: tuple[int, ...] = ()
        deferred: tuple[int, ...] = ()
        prefill: tuple[Chunk, ...] = ()
        until, repeat = inf, ALWAYS
        protected = [self._protect(one) for one in self._parallel.values()]
        if self._waiting or self._deferred or self._urgent or self._filling:
            made = self._plan(now, len(self._serial) + len(protected))
            admitted, refused, deferred, until = made.admit, made.refuse, made.defer, made.until
            prefill = tuple(self._chunk(*one) for one in made.prefill)
            if prefill or admitted or refused or deferred:  # the next step sees others
                repeat = 1
        if self._rows is None:
            self._rows = tuple((number, 0) for number in self._serial)
        branches: tuple[Unit, ...] = ()
        read, wide = self._read, False
        if protected:
            branches = tuple((one.request.id, branch.unit) for one, branch in protected)
            read += sum(one.held + branch.suffix for one, branch in protected)
            asked = self._log is not None or self._extend is not branching.off
            if asked and (candidates := self._candidates(protected)):
                wide = True
                seen = self._seen(now, len(self._rows) + len(branches), read, prefill, candidates)
                chosen = self._extend(seen)
                if self._log is not None:
                    self._log("serving.branching", self.limits.branching, seen, chosen)
                branches += chosen.admitted
                read += sum(self._running[number].branches[unit].suffix for number, unit in chosen.admitted)
                repeat = min(repeat, chosen.holds)
            repeat = min(repeat, self._stays(protected, set(branches)))
        rows = self._rows + branches
        if not rows and not prefill:
            if admitted or deferred:  # who has nothing to prefill before his branches; who waits behind these
                again = self.next(now) or Step(now, ())
                again.admitted, again.refused = admitted + again.admitted, refused + again.refused
                return again
            return Step(now, (), refused=refused) if refused else None
        while self._ends and self._stale(self._ends[0]):
            heappop(self._ends)
        if self._ends:
            repeat = min(repeat, self._ends[0][0] - self._steps)
        step = Step(
            now, rows, branches, prefill, tuple(self._joins), tuple(self._forks.items()), admitted, refused,
            read, repeat=repeat, until=until, measured=wide or bool(prefill),
        )  # fmt: skip
        self._joins, self._forks = [], {}
        step.modelled = step.seconds(self.time)
        step.predicted = step.modelled * self.predictor.gain
        return step

    def done(self, step: Step, now: float, ended: Iterable[Unit] = (), count: int = 1) -> Outcome:
        """``step`` was taken ``count`` times, until ``now``; the units in ``ended`` need no more tokens than
        they have got. What was cancelled since is no longer heard of."""
        out, early = Outcome(), set(ended)
        self._steps += count
        self._read += count * len(self._serial)
        if step.measured:
            modelled = step.modelled if count == 1 else step.total(self.time, count)
            self.predictor.measured(len(step.rows), modelled, now - step.began)
        for number, unit in step.branches:
            one = self._running.get(number)
            if one is not None:
                branch = one.branches[unit]
                branch.suffix, branch.left = branch.suffix + count, branch.left - count
                self._emitted(one, count, count, out, now)
                if branch.left <= 0:
                    self._branch_ends(one, branch, out, now)
        for number, unit in sorted(early):
            one = self._running.get(number)
            if one is not None and unit == 0 and number in self._serial:
                self._trunk_ends(one, out, now)
            elif one is not None and unit in one.branches and one.branches[unit].live:
                self._branch_ends(one, one.branches[unit], out, now)
        while self._ends and self._ends[0][0] <= self._steps:
            if not self._stale(last := heappop(self._ends)):
                self._trunk_ends(self._serial[last[1]], out, now)
        for chunk in step.prefill:
            if chunk.request in self._running:
                self._filled(self._running[chunk.request], chunk, early, out, now)
        return out

    # admission and prefill

    def _plan(self, now: float, rows: int) -> admission.Decision:
        """What `engine.policy` decides; who is admitted is admitted, who is refused is gone."""
        limits, budget = self.limits, self.limits.chunk
        filling: list[admission.Filling] = []
        for number, unit in chain(self._urgent, self._filling):
            if budget <= 0:
                break
            one = self._running[number]
            begin, end = self._span(one, unit)
            stop = _stop(one.stops if unit == 0 else (), begin, end) - begin
            filling.append(admission.Filling(number, unit, end - begin, stop))
            budget -= stop
        free, slots = limits.kv - self.reserved, limits.rows - len(self._running)
        seen = admission.Observation(
            now, rows, slots, free, limits.chunk, self._backlog, tuple(filling),
            self._candidates_to_admit(budget, slots, free), self.time,
        )  # fmt: skip
        made = self._admit(seen)
        if self._log is not None:
            self._log("serving.engine", limits.admission, seen, made)
        if made.admit or made.refuse or made.defer:
            self._leave_queue(seen.waiting, made, now)
        return made

    def _candidates_to_admit(self, budget: int, slots: int, free: int) -> tuple[admission.Waiting, ...]:
        """The first of the queue; what a cache holds is looked up for those who might be admitted now."""
        queue = self._waiting or self._deferred
        if self._lookup is None or budget <= 0 or slots <= 0:
            return tuple(one for _, one in islice(queue, LOOK))
        found = []
        self._found = {}
        for request, one in islice(queue, LOOK):
            if budget > 0 and slots > 0 and one.reserve <= free:
                cached, stops = self._found[request.id] = self._lookup(request)
                one = self._as_waiting(request, cached, stops, one.due)
                budget, slots, free = budget - one.stop, slots - 1, free - one.reserve
            else:
                budget = 0
            found.append(one)
        return tuple(found)

    def _as_waiting(self, request: Request, cached: int, stops: Depths, due: float) -> admission.Waiting:
        end = self._goal(request.stages[0], request.prompt)
        stop = _stop(stops, cached, end)
        most = self.most(request)
        if self._lookup is not None:  # states are copied at the stops, and one behind them
            most = min(self.limits.kv, most + (len(stops) + 1) * self.limits.state)
        return admission.Waiting(request.id, end - cached, stop - cached, most - cached, due)

    def _leave_queue(self, seen: tuple[admission.Waiting, ...], made: admission.Decision, now: float) -> None:
        queue, kept = self._waiting or self._deferred, []
        for one in seen:
            request, as_queued = queue.popleft()
            if request.id in made.admit:
                cached, stops = self._found.pop(request.id, (request.cached, ()))
                running = _Running(request, cached, stops, one.reserve, now)
                self._running[request.id] = running
                self.reserved += running.reserve
                self._enter(running)
            elif request.id in made.defer:
                self._deferred.append((request, replace(as_queued, due=inf)))
            elif request.id not in made.refuse:
                kept.append((request, as_queued))
        queue.extendleft(reversed(kept))

    @staticmethod
    def _goal(stage: Stage, known: int) -> int:
        """Up to where a trunk of ``known`` tokens is prefilled: branches begin with the last one."""
        return known if isinstance(stage, Serial) else known - 1

    def _span(self, one: _Running, unit: int) -> tuple[int, int]:
        """The positions that are left to prefill."""
        if unit == 0:
            return one.held, self._goal(one.request.stages[one.stage], one.known)
        branch = one.branches[unit]
        return one.held + branch.suffix, one.held + branch.head

    def _chunk(self, number: int, unit: int, tokens: int) -> Chunk:
        one = self._running[number]
        begin, end = self._span(one, unit)
        last = begin + tokens == end and (unit > 0 or isinstance(one.request.stages[one.stage], Serial))
        return Chunk(number, unit, begin, begin + tokens, last)

    def _filled(self, one: _Running, chunk: Chunk, early: set[Unit], out: Outcome, now: float) -> None:
        """A chunk is in the KV; behind a unit's last one it decodes, or the branches begin."""
        key = (chunk.request, chunk.unit)
        self._backlog -= chunk.end - chunk.begin
        begin, end = self._span(one, chunk.unit)
        if chunk.unit:
            one.branches[chunk.unit].suffix += chunk.end - begin
        else:
            one.held = chunk.end
        if chunk.end < end:
            return
        self._urgent.pop(key, None)
        self._filling.pop(key, None)
        if not chunk.samples:
            self._fork(one)
            return
        self._emitted(one, 1, 1, out, now)
        if chunk.unit:
            branch = one.branches[chunk.unit]
            branch.live, branch.left = True, branch.left - 1
            self._parallel[chunk.request] = one
            if branch.left <= 0 or key in early:
                self._branch_ends(one, branch, out, now)
            return
        one.known += 1
        stage = one.request.stages[one.stage]
        assert isinstance(stage, Serial)
        one.began = self._steps
        self._serial[chunk.request], self._rows = one, None
        self._read += one.held
        if stage.tokens == 1 or key in early:
            self._trunk_ends(one, out, now)
        else:
            heappush(self._ends, (self._steps + stage.tokens - 1, chunk.request, one.began))

    # stages

    def _enter(self, one: _Running) -> None:
        """A stage begins: what its trunk lacks is prefilled, then its branches' heads."""
        path, beside = _size(one.request.stages[one.stage])
        one.path, one.beside = one.path - path, one.beside - beside
        begin, end = self._span(one, 0)
        if begin < end:
            (self._urgent if one.first < inf else self._filling)[one.request.id, 0] = None
            self._backlog += end - begin
        else:
            self._fork(one)

    def _fork(self, one: _Running) -> None:
        stage = one.request.stages[one.stage]
        assert isinstance(stage, Parallel)
        for head, tokens in zip(stage.heads, stage.tokens, strict=True):
            one.units += 1
            one.branches[one.units] = _Branch(one.units, head + 1, tokens)
            self._urgent[one.request.id, one.units] = None
            self._backlog += head + 1
        self._forks[one.request.id] = tuple(one.branches)

    def _trunk_ends(self, one: _Running, out: Outcome, now: float) -> None:
        steps, one.began = self._steps - one.began, -1
        one.held, one.known = one.held + steps, one.known + steps
        one.emitted, one.steps = one.emitted + steps, one.steps + steps
        del self._serial[one.request.id]
        self._rows = None
        self._read -= one.held
        out.ended.append((one.request.id, 0))
        self._stage_ends(one, out, now)

    def _branch_ends(self, one: _Running, branch: _Branch, out: Outcome, now: float) -> None:
        del one.branches[branch.unit]
        one.tail += branch.suffix
        out.ended.append((one.request.id, branch.unit))
        if not any(other.live for other in one.branches.values()):
            del self._parallel[one.request.id]
        if not one.branches:
            stage = one.request.stages[one.stage]
            assert isinstance(stage, Parallel)
            one.known, one.tail = one.known + one.tail + stage.join, 0
            if self._stage_ends(one, out, now):
                self._joins.append(one.request.id)

    def _stage_ends(self, one: _Running, out: Outcome, now: float) -> bool:
        """Whether another one begins."""
        one.stage += 1
        if one.stage < len(one.request.stages):
            self._enter(one)
            return True
        self._leave(one)
        out.finished.append(Finished(one.request, one.admitted, one.first, now, one.emitted, one.steps))
        return False

    def _leave(self, one: _Running) -> None:
        """A request is done or cancelled: nothing of it remains."""
        number = one.request.id
        for unit in (0, *one.branches):
            if (number, unit) in self._urgent or (number, unit) in self._filling:
                begin, end = self._span(one, unit)
                self._backlog -= end - begin
                self._urgent.pop((number, unit), None)
                self._filling.pop((number, unit), None)
        if number in self._serial:
            del self._serial[number]
            self._rows = None
            self._read -= one.held + self._steps - one.began
        self._parallel.pop(number, None)
        self._forks.pop(number, None)
        if number in self._joins:
            self._joins.remove(number)
        del self._running[number]
        self.reserved -= one.reserve

    def _emitted(self, one: _Running, tokens: int, steps: int, out: Outcome, now: float) -> None:
        one.emitted += tokens
        if one.first == inf:
            one.first, one.stamp = now, self._steps
            out.first.append(one.request.id)
        elif one.stamp != self._steps:  # several branches, one step
            one.steps, one.stamp = one.steps + steps, self._steps

    def _stale(self, end: tuple[int, int, int]) -> bool:
        one = self._serial.get(end[1])
        return one is None or one.began != end[2]

    # branches

    @staticmethod
    def _protect(one: _Running) -> tuple[_Running, _Branch]:
        """The branch with most work left; the one that it was before, until another has `PATIENCE` more."""
        most, best = -1, None
        for branch in one.branches.values():
            left = branch.left + PATIENCE if branch.unit == one.protected else branch.left
            if left > most and branch.live:
                most, best = left, branch
        assert best is not None
        one.protected = best.unit
        return one, best

    @staticmethod
    def _candidates(protected: list[tuple[_Running, _Branch]]) -> Candidates:
        return tuple(
            branching.Candidate(one.request.id, branch.unit, branch.suffix, branch.left)
            for one, best in protected
            if len(one.branches) > 1
            for branch in one.branches.values()
            if branch.live and branch is not best
        )

    @staticmethod
    def _stays(protected: list[tuple[_Running, _Branch]], chosen: set[Unit]) -> int:
        """For how many steps in a row the same branches are protected, and none ends before the last."""
        steps = ALWAYS
        for one, best in protected:
            steps = min(steps, best.left)
            for branch in one.branches.values():
                if branch.live and branch is not best:
                    taken = (one.request.id, branch.unit) in chosen
                    steps = min(steps, branch.left if taken else best.left + PATIENCE - branch.left + 1)
        return steps

    def _due(self, one: _Running) -> float:
        """When its next token is."""
        objective = one.request.objective
        if one.first == inf:
            return one.request.arrival + objective.ttft
        more = self._steps - one.began if one.began >= 0 else 0
        count = one.emitted if self.limits.pace == "token" else one.steps + 1
        return one.first + (count + more) * objective.tpot

    def _left(self, one: _Running) -> tuple[int, int]:
        """Tokens that it has to decode one after another at most, and beside those."""
        if one.branches:
            left = [branch.left for branch in one.branches.values()]
            return one.path + max(left), one.beside + sum(left) - max(left)
        (tokens, _), done = _size(one.request.stages[one.stage]), self._steps - one.began + 1
        return one.path + tokens - done, one.beside

    def _seen(
        self, now: float, rows: int, read: int, prefill: tuple[Chunk, ...], candidates: Candidates
    ) -> branching.Observation:
        """The step as `branching.policy` sees it."""
        limits = self.limits
        slacks: list[tuple[int, float, float, int, int]] = []
        for one in chain(self._serial.values(), self._parallel.values()):
            if (due := self._due(one)) < inf:
                slacks.append((one.request.id, due - now, one.request.objective.tpot, *self._left(one)))
        ahead = -sum(one.end - one.begin for one in prefill)
        for number, unit in chain(self._urgent, self._filling):
            one = self._running[number]
            begin, end = self._span(one, unit)
            ahead += end - begin
            if number not in self._parallel and (due := self._due(one)) < inf:
                needed = admission.fill_time(self.time, rows, max(0, ahead), limits.chunk)
                slacks.append((number, due - now - needed, 0.0, 0, 0))
        requests, seconds, paces, left, beside = zip(*slacks, strict=True) if slacks else ((),) * 5
        return branching.Observation(
            now, rows, read, tuple((one.end - one.begin, one.end) for one in prefill), requests, seconds,
            paces, left, beside, candidates, limits.rows - rows, self.time, self.predictor.gain,
            self.predictor.margins, self.predictor.widths, limits.rho, limits.pace,
        )  # fmt: skip
