"""What the desk promises whatever happens to replicas, and what background jobs may cost the others."""

from __future__ import annotations

import heapq
import math
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.serving.variants.model import Query, Variant
from windtunnel.serving.variants.policy import POLICIES
from windtunnel.serving.variants.policy.desk import (
    ATTEMPTS,
    BatchRun,
    Desk,
    Effect,
    Hosted,
    RequestFailure,
    Start,
    Stop,
    VariantRequest,
)
from windtunnel.serving.variants.twin import VariantsOutcome, VariantsSetting, simulate

GIB = 1 << 30
STEPS = st.lists(
    st.sampled_from(
        ("ask", "hurry", "later", "done", "died", "refused", "gone", "second", "starts", "starts not")
    ),
    max_size=60,
)


def variant(name: str, **other: object) -> Variant:
    fields = {"load": 2.0, "slope": 0.01, "intercept": 0.002, "memory": GIB, "accuracy": 0.9, "price": 1.0}
    return Variant(name, "net", "digits", **{**fields, **other})  # type: ignore[arg-type]


class Story:
    """A host with two cores, to whose desk things happen; every request has one end."""

    def __init__(self, policy: str) -> None:
        variants = (variant("net:1"), variant("net:8", batch=8, slope=0.004, threads=2, price=2.0))
        self.desk = Desk(variants, POLICIES[policy], grows=False)
        self.host = Hosted(name="a", hardware="cpu", cores=2, free=32 * GIB)
        self.desk.hosts["a"] = self.host
        self.now, self.asked, self.loading = 0.0, 0, list[Start]()
        self.running, self.ends, self.left = list[BatchRun](), Counter[int](), set[int]()

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Start):
                self.loading.append(effect)
            elif isinstance(effect, BatchRun):
                self.running.append(effect)
            elif isinstance(effect, RequestFailure):
                query = effect.request.query
                assert not effect.shed or (query.latency < math.inf and not query.background)
                self.ends[effect.request.query.id] += 1
            else:
                assert isinstance(effect, Stop) and effect.group.idle >= 0
        self.holds()

    def holds(self) -> None:
        groups = self.host.groups.values()
        assert self.host.used == sum(batch.group.variant.threads for batch in self.running)
        assert self.host.background == sum(len(group.background) for group in groups)
        for group in groups:
            assert len(group.begun) == sum(run.group is group for run in self.running) <= group.ready
            assert group.waiting == sum(each.query.items for each in group.queue)
            assert not (group.queue and group.idle)
            assert group.count or not (group.queue or group.background)

    def step(self, what: str) -> None:
        self.now += 0.3
        match what:
            case "ask" | "hurry" | "later":
                self.asked += 1
                latency = math.inf if what == "ask" else 0.5
                query = Query(self.asked, "digits", latency=latency, background=what == "later")
                self.do(self.desk.ask(VariantRequest(query, self.now), self.now))
            case "done" | "died" | "refused" if self.running:
                run = self.running.pop(0)
                if what == "done":
                    self.ends.update(request.query.id for request in run.batch)
                    self.do(self.desk.answered(run.group, run.batch, 0.01, self.now))
                else:
                    self.do(getattr(self.desk, what)(run.group, run.batch, what, self.now))
            case "starts" | "starts not" if self.loading:
                start = self.loading.pop(0)
                if what == "starts":
                    self.do(self.desk.loaded(start.group, start.due, self.now))
                else:
                    self.do(self.desk.unloadable(start.group, start.due, what, self.now))
            case "gone":
                waiting = [request for group in self.host.groups.values() for request in group.queue]
                for request in waiting[:1]:
                    self.ends[request.query.id] += 1
                    self.desk.leave(request)
                    self.holds()
            case "second":
                self.do(self.desk.second(self.now, {"a": min(1.0, self.host.used / 2)}))


@settings(max_examples=60, deadline=None)
@given(STEPS, st.sampled_from(("infaas", "cheapest")))
def test_every_request_has_one_end_whatever_becomes_of_replicas(steps: list[str], policy: str) -> None:
    story = Story(policy)
    for what in steps:
        story.step(what)
    for _ in range(400):
        if sum(story.ends.values()) == story.asked:
            break
        for what in ("starts", "done", "second"):
            story.step(what)
    assert story.ends == Counter(range(1, story.asked + 1))


def test_who_outlives_no_replica_fails_after_some_attempts() -> None:
    story = Story("infaas")
    story.step("ask")
    for attempt in range(ATTEMPTS):
        assert not story.ends, attempt
        story.step("starts")
        story.step("died")
    assert story.ends == {1: 1} and not story.running


def test_a_background_job_begins_where_nobody_waits_and_no_core_is_taken() -> None:
    story = Story("infaas")
    for what in ("ask", "starts", "later", "later", "ask"):
        story.step(what)
    wide = story.running[0].group
    assert (wide.variant.threads, len(wide.background), len(wide.queue)) == (2, 2, 1)
    narrow = story.desk.group("net:1", "a")
    story.do([story.desk.start(narrow, story.now)])
    narrow.put(VariantRequest(Query(5, "digits", background=True), story.now))
    story.step("starts")  # both cores are used
    story.step("done")  # who asked goes first, though it came last
    assert [[request.query.id for request in run.batch] for run in story.running] == [[4]]
    story.step("done")
    assert [[request.query.id for request in run.batch] for run in story.running] == [[2, 3]]
    story.step("done")
    assert [[request.query.id for request in run.batch] for run in story.running] == [[5]]


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.2, 0.9), st.integers(1, 150))
def test_a_background_job_delays_nobody_by_more_than_the_batch_under_way(
    seed: int, load: float, jobs: int
) -> None:
    net = variant("net:8", threads=8, slope=0.02, intercept=0.0)
    rng = np.random.default_rng(seed)
    times = np.sort(rng.uniform(3, 13, rng.poisson(load * 10 / 0.02)))
    later = np.sort(rng.uniform(3, 13, jobs))

    def outcome(*background: tuple[float, Query]) -> VariantsOutcome:
        online = [(at, Query(number, "digits")) for number, at in enumerate(times.tolist())]
        asked = sorted([*online, *background], key=lambda pair: pair[0])
        setting = VariantsSetting((net,), {}, True, {"net": net.name}, own=True, warm=0.0)
        return simulate(asked, 30.0, setting, POLICIES["static"])

    alone = outcome()
    both = outcome(*((at, Query(-1, "digits", background=True)) for at in later.tolist()))
    assert both.background == jobs and both.came == alone.came == len(times)
    assert len(both.latencies) == len(alone.latencies) == len(times)
    slower = np.array(both.latencies) - np.array(alone.latencies)
    assert slower.max(initial=0.0) <= net.latency() + 1e-9


def overloaded(net: Variant, replicas: int, rate: float, bounds: list[float], seed: int) -> tuple[
    list[tuple[float, Query]], VariantsOutcome
]:  # fmt: skip
    """Five seconds, of which the first is not counted, and what became of who came in them."""
    rng = np.random.default_rng(seed)
    times = np.sort(rng.uniform(3, 8, int(rate * 5))).tolist()
    asked = [(at, Query(number, "digits", latency=rng.choice(bounds))) for number, at in enumerate(times)]
    peak = {"net": 0.7 * net.rate * replicas - 1e-6}
    setting = VariantsSetting((net,), {}, True, {"net": net.name}, own=True, peak=peak, warm=4.0)
    return asked, simulate(asked, 30.0, setting, POLICIES["static"])


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 3), st.floats(0.5, 3.0), st.integers(0, 10**6))
def test_who_is_shed_could_not_have_been_in_time_and_nobody_else_is_late(
    replicas: int, load: float, seed: int
) -> None:
    net = variant("net:1", slope=0.02, intercept=0.0)
    asked, outcome = overloaded(net, replicas, load * replicas * net.rate, [0.021, 0.05, 0.3], seed)
    free, took, shed = [0.0] * replicas, [], 0
    for came, query in asked:  # first come, first served
        end = max(came, free[0]) + net.latency()
        if end - came <= query.latency:
            heapq.heapreplace(free, end)
            took += [end - came] if came >= 4.0 else []
        else:
            shed += came >= 4.0
    assert (outcome.late, outcome.shed, outcome.came) == (0, shed, len(took) + shed)
    np.testing.assert_allclose(sorted(outcome.latencies), sorted(took), atol=1e-6)


@settings(max_examples=6, deadline=None)
@given(
    st.sampled_from((1, 8)), st.integers(1, 3), st.floats(2.1, 8.0), st.floats(2.0, 4.0),
    st.integers(0, 10**6),
)  # fmt: skip
def test_under_overload_most_of_what_replicas_can_do_is_answered_in_time(
    batch: int, replicas: int, bound: float, load: float, seed: int
) -> None:
    net = variant("net:8", batch=batch, slope=0.01, intercept=0.04)
    limit = bound * net.latency(batch)
    _, outcome = overloaded(net, replicas, load * replicas * net.rate, [limit, 2 * limit], seed)
    in_time = outcome.came - outcome.late - outcome.shed
    assert in_time == len(outcome.latencies) - outcome.late >= 0.8 * 4.0 * replicas * net.rate
    assert outcome.late <= 0.02 * in_time


def test_a_background_job_loads_the_cheapest_and_brings_no_hosts() -> None:
    story = Story("infaas")
    for _ in range(200):
        story.step("later")
    assert [start.group.variant.name for start in story.loading] == ["net:1"] and not story.desk.needs
    story.step("starts")
    for _ in range(30):
        story.step("second")
    assert not story.loading and not story.desk.needs


def test_where_all_replicas_hang_the_load_goes_elsewhere_until_they_go_on() -> None:
    story = Story("infaas")
    for what in ("ask", "starts", "second", "second", "second"):
        story.step(what)
    hung = story.running[0].group
    assert hung.state == "interfered" and hung.slow > 4
    other = story.desk.group("net:1" if hung.variant.name == "net:8" else "net:8", "a")
    story.do([story.desk.start(other, story.now)])
    for what in ("starts", "ask"):
        story.step(what)
    assert [run.group for run in story.running] == [hung, other]
    for what in ("done", "done", "second", "second"):
        story.step(what)
    assert hung.state == "active" and not hung.begun


def test_who_waits_behind_a_hung_replica_gets_another_as_soon_as_the_host_has_room() -> None:
    story = Story("cheapest")
    story.host.cores = 4
    for event in ("ask", "starts", "second", "second", "ask"):
        story.step(event)
    hung = story.running[0].group
    assert hung.stuck == hung.ready == 1 and hung.waiting == 1 and not story.loading
    story.now += 1.0
    story.do(story.desk.second(story.now, {"a": 1.0}))
    assert not story.loading  # the host was busy
    for _ in range(3):
        story.now += 1.0
        story.do(story.desk.second(story.now, {"a": 0.0}))
    assert [start.group for start in story.loading] == [hung]
