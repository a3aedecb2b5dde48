"""The engine's scheduler against a model of tensors that believes nothing it is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.serving.engine.model import InferenceRequest, Objective, Parallel, Serial, StepTime
from windtunnel.serving.engine.policy.scheduler import EngineScheduler
from windtunnel.serving.engine.policy.step import Finished, ScheduledStep, StepLimits, Unit

TIME = StepTime(base=0.01, row=1e-4, kv=1e-6, token=3e-4, pair=1e-7)


@st.composite
def stages(draw: st.DrawFn) -> tuple[Serial | Parallel, ...]:
    stage_list: list[Serial | Parallel] = []
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            stage_list.append(Serial(draw(st.integers(1, 9))))
        else:
            count = draw(st.integers(1, 4))
            sizes = st.lists(st.integers(1, 7), min_size=count, max_size=count).map(tuple)
            heads = st.lists(st.integers(0, 9), min_size=count, max_size=count).map(tuple)
            stage_list.append(Parallel(draw(heads), draw(sizes), draw(st.integers(0, 5))))
    return tuple(stage_list)


@st.composite
def workloads(draw: st.DrawFn) -> list[InferenceRequest]:
    at, requests = 0.0, []
    for number in range(draw(st.integers(1, 12))):
        at += draw(st.sampled_from([0.0, 0.004, 0.03, 0.2]))
        prompt = draw(st.integers(1, 60))
        objective = Objective(
            draw(st.sampled_from([inf, 0.02, 0.1, 0.5])), draw(st.sampled_from([inf, 0.02]))
        )
        cached = draw(st.integers(0, prompt - 1))
        requests.append(InferenceRequest(number, at, prompt, draw(stages()), objective, cached))
    return requests


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[InferenceRequest], StepLimits]:
    """Requests, and limits whose memory binds: the largest request fits, two of them perhaps do not."""
    workload = draw(workloads())
    limits = StepLimits(
        rows=draw(st.integers(1, 6)), kv=0, chunk=draw(st.integers(1, 40)), state=draw(st.integers(0, 3)),
        admission=draw(st.sampled_from(["wait", "refuse"])),
        branching=draw(st.sampled_from(["off", "eager", "taper"])),
    )  # fmt: skip
    most = max(map(EngineScheduler(limits, TIME).most, workload))
    return workload, replace(limits, kv=draw(st.integers(most, 2 * most)))


@dataclass
class Tensors:
    """What an executor would hold: how long each unit's KV is, and what was sampled in it."""

    requests: dict[int, InferenceRequest]
    kv: dict[Unit, int] = field(default_factory=dict)
    sampled: dict[Unit, int] = field(default_factory=dict)
    known: dict[int, int] = field(default_factory=dict)
    stage: dict[int, int] = field(default_factory=dict)
    branches: dict[int, tuple[int, ...]] = field(default_factory=dict)
    waiting_heads: dict[Unit, int] = field(default_factory=dict)

    def take(self, step: ScheduledStep) -> None:
        for number in step.admitted:
            request = self.requests[number]
            self.kv[number, 0] = request.cached
            self.known[number], self.stage[number] = request.prompt, 0
        for number in step.joins:
            stage = self.requests[number].stages[self.stage[number]]
            assert isinstance(stage, Parallel)
            joined = sum(self.sampled.pop((number, unit)) for unit in self.branches[number])
            for unit in self.branches.pop(number):
                del self.kv[number, unit]
            self.known[number] += joined + sum(stage.heads) + stage.join
            self.stage[number] += 1
        for number, units in step.forks:
            assert self.kv[number, 0] == self.known[number] - 1
            if isinstance(self.requests[number].stages[self.stage[number]], Serial):
                self.stage[number] += 1
            stage = self.requests[number].stages[self.stage[number]]
            assert isinstance(stage, Parallel) and len(units) == len(stage.heads)
            self.branches[number] = units
            for unit, head in zip(units, stage.heads, strict=True):
                self.kv[number, unit] = self.kv[number, 0]
                self.waiting_heads[number, unit] = self.kv[number, 0] + 1 + head
        for chunk in step.prefill:
            key = (chunk.request, chunk.unit)
            assert self.kv[key] == chunk.begin < chunk.end
            self.kv[key] = chunk.end
            if chunk.unit:
                assert chunk.samples == (chunk.end == self.waiting_heads[key])
            if chunk.samples:
                if chunk.unit == 0:
                    stage = self.requests[chunk.request].stages[self.stage[chunk.request]]
                    if not isinstance(stage, Serial) or self.sampled.pop(key, 0):
                        self.stage[chunk.request] += 1
                    assert chunk.end == self.known[chunk.request]
                    self.known[chunk.request] += 1
                self.sampled[key] = 1
        for key in step.rows:
            self.kv[key] += 1
            self.sampled[key] += 1
            if key[1] == 0:
                self.known[key[0]] += 1

    def held(self, joining: set[int]) -> int:
        """Tokens in the KV; of requests that are ``joining`` those of the parent."""
        parents = sum(length for (_, unit), length in self.kv.items() if unit == 0)
        return parents + sum(
            length - self.kv[number, 0]
            for (number, unit), length in self.kv.items()
            if unit and number not in joining
        )

    def drop(self, number: int) -> None:
        for held in (self.kv, self.sampled, self.waiting_heads):
            for key in [key for key in held if key[0] == number]:
                del held[key]
        self.branches.pop(number, None)


@dataclass
class Ran:
    finished: list[Finished]
    refused: list[int]
    steps: int


def run(
    workload: list[InferenceRequest],
    given_limits: StepLimits,
    *,
    jump: bool = False,
    cancel: Callable[[int], list[int]] = lambda step: [],
    ends: Callable[[Unit], bool] = lambda unit: False,
) -> Ran:
    """The whole workload, on a virtual clock; everything that must hold in each step is looked at."""
    scheduler = EngineScheduler(given_limits, TIME)
    tensors = Tensors({request.id: request for request in workload})
    ran, now, arrived = Ran([], [], 0), 0.0, 0
    cancelled: set[int] = set()
    decoding: set[int] = set()
    alive: set[Unit] = set()
    ended: set[Unit] = set()
    while True:
        while arrived < len(workload) and workload[arrived].arrival <= now:
            assert scheduler.arrive(workload[arrived]) == ""
            arrived += 1
        step = scheduler.next(now)
        if step is None:
            assert scheduler.waiting == scheduler.running == 0
            if arrived == len(workload):
                break
            now = workload[arrived].arrival
            continue
        ran.refused += step.refused
        assert len(step.rows) <= given_limits.rows and len(set(step.rows)) == len(step.rows)
        assert sum(part.end - part.begin for part in step.prefill) <= given_limits.chunk
        assert decoding - {number for number, _ in step.rows} == set(), "somebody who decodes was left out"
        count = 0
        while True:
            if step.work:
                tensors.take(step if count == 0 else replace(step, joins=(), forks=(), admitted=()))
                now += step.seconds(TIME, count)
            count += 1
            coming = workload[arrived].arrival if arrived < len(workload) else inf
            if not jump or count >= step.repeat or now > step.until or coming <= now or not step.work:
                break
        ran.steps += 1
        past = {finished.request.id for finished in ran.finished} | set(ran.refused)
        gone = [number for number in cancel(ran.steps) if number < arrived and number not in past]
        for number in gone:
            scheduler.cancel(number)
            tensors.drop(number)
        cancelled |= set(gone)
        if not step.work:
            continue
        sampled = [*step.rows, *((part.request, part.unit) for part in step.prefill if part.samples)]
        out = scheduler.done(step, now, [unit for unit in sampled if ends(unit)], count)
        ran.finished += out.finished
        over = {finished.request.id for finished in out.finished}
        for number in over:
            tensors.drop(number)
        alive = {
            unit for unit in alive.union(sampled).difference(out.ended) if unit[0] not in over | cancelled
        }
        decoding = {number for number, _ in alive}
        assert 0 <= scheduler.reserved <= given_limits.kv
        ended.update(out.ended)
        done = {
            number
            for number, units in tensors.branches.items()
            if all((number, unit) in ended for unit in units)
        }
        held = tensors.held(done)
        assert scheduler.kv_used() == held
        lent = sum(tensors.requests[number].cached for number, unit in tensors.kv if unit == 0)
        assert held - lent <= scheduler.reserved
    assert scheduler.kv_used() == scheduler.reserved == 0 and not tensors.kv
    over = {finished.request.id for finished in ran.finished}
    assert len(over) == len(ran.finished) and not over & cancelled
    assert over | cancelled | set(ran.refused) == {request.id for request in workload}
    assert not over & set(ran.refused)
    return ran


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_all_is_decoded_in_its_place_and_a_jump_is_as_many_single_steps(
    case: tuple[list[InferenceRequest], StepLimits],
) -> None:
    workload, given_limits = case
    single = run(workload, given_limits)
    for finished in single.finished:
        asked = sum(
            sum(stage.tokens) if isinstance(stage, Parallel) else stage.tokens
            for stage in finished.request.stages
        )
        assert finished.tokens == asked and finished.request.arrival < finished.first <= finished.end
    jumped = run(workload, given_limits, jump=True)
    assert jumped.finished == single.finished and jumped.refused == single.refused
    if given_limits.admission != "refuse":
        assert single.refused == []


@settings(max_examples=40, deadline=None)
@given(
    case=cases(),
    gone=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 11)), max_size=6),
    short=st.sets(st.tuples(st.integers(0, 11), st.integers(0, 6)), max_size=12),
)
def test_clients_may_leave_and_units_may_end_at_any_time(
    case: tuple[list[InferenceRequest], StepLimits], gone: list[tuple[int, int]], short: set[Unit]
) -> None:
    workload, given_limits = case
    left: set[int] = set()

    def cancel(step: int) -> list[int]:
        now = [number for at, number in gone if at == step and number not in left and number < len(workload)]
        left.update(now)
        return now

    run(workload, replace(given_limits, admission="wait"), cancel=cancel, ends=lambda unit: unit in short)
