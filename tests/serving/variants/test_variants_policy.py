"""What the rules of variants promise, for any variants and queries."""

from __future__ import annotations

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.serving.variants.model import HostReplicas, Query, ReplicaHost, Variant, VariantCandidate
from windtunnel.serving.variants.policy import POLICIES, decide
from windtunnel.serving.variants.policy.scale import (
    LEGAL,
    Fleet,
    Load,
    Measured,
    Now,
    ReplicaChange,
    Resize,
    Running,
    Scaling,
)
from windtunnel.serving.variants.policy.select import (
    QUEUE,
    Batch,
    Chosen,
    QueryRefused,
    VariantQuery,
    Waiting,
    feasible,
)

GIB = 1 << 30
HOST = ReplicaHost("a", "cpu", 8, 32 * GIB)


def variant(name: str = "net:1", **other: object) -> Variant:
    fields = {"load": 1.0, "slope": 0.01, "intercept": 0.002, "memory": GIB, "accuracy": 0.9, "price": 1.0}
    return Variant(name, name.split(":")[0], "digits", **{**fields, **other})  # type: ignore[arg-type]


@st.composite
def asked(draw: st.DrawFn) -> VariantQuery:
    candidates = []
    for number in range(draw(st.integers(0, 6))):
        net = variant(
            f"net{draw(st.integers(0, 1))}:{number}", slope=draw(st.sampled_from((0.001, 0.01, 0.1))),
            batch=draw(st.sampled_from((1, 8))), accuracy=draw(st.sampled_from((0.5, 0.9))),
            hardware=draw(st.sampled_from(("cpu", "v100"))), load=draw(st.sampled_from((0.1, 5.0))),
        )  # fmt: skip
        states = draw(st.lists(st.sampled_from(("active", "overloaded", "interfered")), max_size=2))
        wait = draw(st.sampled_from((0.0, 0.05, 2.0)))
        candidates.append(VariantCandidate(net, tuple(
            HostReplicas(f"h{place}", state, 1, wait=wait) for place, state in enumerate(states)
        )))  # fmt: skip
    query = Query(
        draw(st.integers(0, 5)), "digits",
        items=draw(st.sampled_from((1, 4))), accuracy=draw(st.sampled_from((0.0, 0.8))),
        latency=draw(st.sampled_from((0.004, 0.05, 0.3, math.inf))),
        cost=draw(st.sampled_from((0.02, math.inf))),
    )  # fmt: skip
    hosts = (
        ReplicaHost("h0", "cpu", 8, draw(st.sampled_from((0, 16 * GIB)))),
        ReplicaHost("h1", "v100", 1, 8 * GIB),
    )
    recent = draw(
        st.lists(st.sampled_from([candidate.variant.name for candidate in candidates] or ["x"]), max_size=3)
    )
    waiting = draw(st.sampled_from((0, QUEUE)))
    return VariantQuery(query, tuple(candidates), hosts, tuple(recent), waiting=waiting)


@settings(max_examples=60, deadline=None)
@given(asked(), st.sampled_from(sorted(POLICIES)))
def test_who_answers_can_and_is_loaded_and_unflagged_where_one_is(
    observation: VariantQuery, policy: str
) -> None:
    decision = POLICIES[policy](observation)
    by_name = {candidate.variant.name: candidate for candidate in observation.candidates}
    fit = [
        candidate for candidate in observation.candidates if feasible(observation.query, candidate.variant)
    ]
    assert isinstance(decision, QueryRefused) == (not fit)
    if not isinstance(decision, Chosen):
        assert isinstance(decision, QueryRefused) and decision.reason
        return
    chosen = by_name[decision.variant]
    assert chosen in fit
    calm = [
        held for candidate in fit for held in candidate.replicas if held.state == "active"
        and held.wait + candidate.variant.latency(4) < 0.8 * observation.query.latency
    ]  # fmt: skip
    if calm:
        held = next(held for held in chosen.replicas if held.host == decision.host)
        assert held.state == "active" and not decision.load and not decision.need
        assert held.wait + chosen.variant.latency(observation.query.items) <= observation.query.latency
    takes = [
        held.answers(candidate.variant, observation.query.items)
        for candidate in fit
        for held in candidate.replicas
    ]
    if decision.shed and observation.query.latency < math.inf:  # nobody who could be in time is
        assert decision.shed >= 1 and min(takes, default=math.inf) > observation.query.latency
    elif observation.query.latency == math.inf:
        assert (decision.shed > 0) == (observation.waiting == QUEUE)
    elif not decision.load:  # and all who could not be
        takes = [
            held.answers(chosen.variant, observation.query.items)
            for held in chosen.replicas
            if held.host == decision.host
        ]
        assert takes[0] <= observation.query.latency
    if decision.load:
        host = (
            next(host for host in observation.hosts if host.name == decision.host) if decision.host else None
        )
        assert not chosen.replicas
        assert host is None or (host.hardware, host.free >= GIB) == (chosen.variant.hardware, True)
        assert decision.need == (host is None)


def test_what_is_loaded_is_what_the_policy_says() -> None:
    quick = variant("net:1", load=1.0, price=1.0)
    cheap = variant("net:8", load=3.0, price=2.0, batch=8, slope=0.002)
    held = HostReplicas(HOST.name, "active", 1, wait=9.0)

    def after(policy: str, *candidates: VariantCandidate) -> tuple[str, bool]:
        decision = POLICIES[policy](VariantQuery(Query(0, "digits", latency=0.05), candidates, (HOST,)))
        assert isinstance(decision, Chosen)
        return decision.variant, decision.load

    nothing = VariantCandidate(quick), VariantCandidate(cheap)
    assert after("infaas", *nothing) == ("net:1", True)
    assert after("cheapest", *nothing) == ("net:8", True)
    late = VariantCandidate(cheap, (held,))
    assert after("infaas", VariantCandidate(quick), late) == ("net:1", True)
    assert after("cheapest", VariantCandidate(quick), late) == ("net:8", False)
    decision = decide(VariantQuery(Query(0, "digits", latency=0.05), (late,), (HOST,)))
    assert isinstance(decision, Chosen) and decision.shed == 9.0 + 0.004 - 0.05
    assert decision.reason == "digits: shed, since net:8 would take 9 s; ask again in 9 s"


def test_what_cannot_be_done_is_refused_with_the_nearest() -> None:
    observation = VariantQuery(
        Query(0, "digits", accuracy=0.95, latency=0.5), (VariantCandidate(variant()),), (HOST,)
    )
    decision = decide(observation)
    assert isinstance(decision, QueryRefused)
    assert decision.reason == (
        "digits: no variant does accuracy 0.95 within 0.5 s; the most accurate has 0.9; "
        "as fast ones have accuracy 0.9"
    )


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from((-1.0, 0.03, 0.05, 0.2))), min_size=1, max_size=9),
    st.sampled_from((1, 4, 16)), st.sampled_from((1.0, 2.0)),
)  # fmt: skip
def test_a_batch_makes_nobody_late_and_who_would_be_late_alone_is_shed(
    waiting: list[tuple[int, float]], most: int, slow: float
) -> None:
    net = variant(batch=most)
    items, slack = zip(*waiting, strict=True)
    batch = decide(Waiting(net, items, slack, slow=slow))
    assert isinstance(batch, Batch)
    lost = {place for place, (count, left) in enumerate(waiting) if left < net.latency(count) * slow}
    kept = [each for place, each in enumerate(waiting) if place not in batch.shed]
    assert lost <= {*batch.shed} and min(1, len(kept)) <= batch.requests <= len(kept)
    inside = kept[: batch.requests]
    total = sum(count for count, _ in inside)
    assert batch.requests <= 1 or total <= most
    alone = decide(Waiting(net, items, slack, slow=slow, busy=True))
    assert alone == Batch(0, tuple(sorted(lost)))
    if {*batch.shed} > lost:  # who would be in time alone goes only where more are answered by that
        left = [each for place, each in enumerate(waiting) if place not in lost]
        counts = itertools.accumulate(count for count, _ in left)
        leasts = itertools.accumulate((time for _, time in left), min)
        sums = zip(counts, leasts, strict=True)
        first = sum(count <= most and time >= net.latency(count) * slow for count, time in sums)
        assert batch.requests >= first
    assert all(left >= net.latency(total) * slow for _, left in inside)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(LEGAL)), st.integers(0, 3), st.floats(0, 500), st.floats(0, 2),
    st.integers(0, 1000), st.sampled_from(("cpu", "v100")),
)  # fmt: skip
def test_states_change_only_as_they_may(
    state: str, replicas: int, rate: float, latency: float, outstanding: int, hardware: str
) -> None:
    observation = Measured(variant(hardware=hardware), state, replicas, rate, latency, 1.0, outstanding)  # type: ignore[arg-type]
    decision = decide(observation)
    assert isinstance(decision, Now)
    assert decision.state == state or decision.state in LEGAL[observation.state]
    assert (decision.state == "inactive") == (replicas == 0)


def test_flags_are_raised_and_taken_back() -> None:
    net = variant()  # 83 items a second

    def after(state: str, **other: object) -> str:
        decision = decide(Measured(net, state, 2, **other))  # type: ignore[arg-type]
        assert isinstance(decision, Now)
        return decision.state

    assert after("active", outstanding=150) == "overloaded"
    assert after("active", rate=60.0, latency=0.05) == "interfered"
    assert after("active", rate=9.0, latency=0.05) == "active"  # slow, but hardly asked
    assert after("active", rate=20.0, latency=0.2) == "interfered"  # beside what leaves it little of a core
    assert after("overloaded", outstanding=20) == "active"
    assert after("interfered", rate=60.0, latency=0.02) == "interfered"
    assert after("interfered", rate=60.0, latency=0.013) == "active"


def scaled(load: Load) -> Scaling:
    decision = decide(load)
    assert isinstance(decision, Scaling)
    return decision


def test_the_load_is_met_by_replicas_or_by_what_is_sooner_loaded() -> None:
    small, large = variant(), variant("net:8", batch=8, slope=0.002, price=2.0, load=1.2)
    assert scaled(Load(HOST, (Running(small, 1, 70.0),))).changes == ()
    assert scaled(Load(HOST, (Running(small, 1, 150.0),))).changes == (ReplicaChange("net:1", 1),)
    # two replicas more take 2 s of loading, the other variant 1.2
    assert scaled(Load(HOST, (Running(small, 1, 230.0),), (large,))).changes == (ReplicaChange("net:8", 1),)
    inaccurate = Running(small, 1, 230.0, accuracy=0.95)
    assert scaled(Load(HOST, (inaccurate,), (large,))).changes == (ReplicaChange("net:1", 2),)
    full = ReplicaHost("a", "cpu", 1, 32 * GIB)
    assert scaled(Load(full, (Running(small, 1, 150.0),))) == Scaling((), (0,), True)
    other = ReplicaHost(
        "b", "cpu", 1, 32 * GIB
    )  # what does not fit here is loaded there, and no host is missing
    scaling = scaled(Load(full, (Running(small, 1, 150.0),), elsewhere=(other,)))
    assert scaling == Scaling((ReplicaChange("net:1", 1, "b"),), (0,))
    for policy in ("no-upgrade", "individual"):
        decision = POLICIES[policy](Load(HOST, (Running(small, 1, 230.0),), (large,)))
        assert isinstance(decision, Scaling) and decision.changes == (ReplicaChange("net:1", 2),)
    assert POLICIES["static"](Load(HOST, (Running(small, 1, 230.0),))) == Scaling((), (0,), False)


def test_less_comes_only_after_votes_and_a_constant_load_changes_nothing() -> None:
    small, large = variant(), variant("net:8", batch=8, slope=0.002, price=2.0)
    votes, changes = 0, []
    for second in range(600):
        scaling = scaled(Load(HOST, (Running(large, 1, 30.0, votes=votes),), (small,)))
        votes = scaling.votes[0]
        changes += [(second, change) for change in scaling.changes]
        if changes:
            break
    assert changes == [(9, ReplicaChange("net:1", 1)), (9, ReplicaChange("net:8", -1))]
    tight = ReplicaHost("a", "cpu", 8, GIB)
    for host, rate, gone in ((HOST, 0.01, False), (tight, 0.01, True), (tight, 1.0, False)):
        scaling = scaled(Load(host, (Running(small, 1, rate, votes=9),)))
        assert bool(scaling.changes) == gone
    for rate in (10.0, 70.0, 79.0, 158.0):  # over ten minutes each
        replicas, votes, changed = 1, 0, 0
        for _ in range(600):
            scaling = scaled(Load(HOST, (Running(small, replicas, rate, votes=votes),), (large,)))
            votes = scaling.votes[0]
            mine = [change for change in scaling.changes if change.variant == "net:1"]
            replicas += sum(change.replicas for change in mine)
            changed += len(mine)
        assert changed <= 1 and replicas == math.ceil(rate / (0.95 * small.rate))


def test_hosts_come_where_one_is_needed_and_go_after_long_low_load() -> None:
    idle = (ReplicaHost("a", "cpu", 8, GIB, 0.1), ReplicaHost("b", "cpu", 8, GIB, 0.05))
    assert decide(Fleet("cpu", idle, 1, True, 15, 0)) == Resize(1)
    assert decide(Fleet("cpu", idle, 1, True, 14, 0)) == Resize()
    assert decide(Fleet("cpu", idle, 1, True, 15, 0, starting=1)) == Resize()
    assert decide(Fleet("cpu", idle, 1, False, 15, 13)) == Resize(low=14)
    assert decide(Fleet("cpu", idle, 1, False, 15, 14)) == Resize(remove="b")
    assert decide(Fleet("cpu", idle, 2, False, 15, 14)) == Resize(low=15)
    assert decide(Fleet("cpu", (ReplicaHost("a", "cpu", 8, GIB, 0.9),), 1, False, 15, 3)) == Resize(1)
    last = (ReplicaHost("b", "v100", 1, GIB, 0.05),)
    assert POLICIES["infaas"](Fleet("v100", last, 0, False, 15, 14)) == Resize(remove="b")
    assert decide(Fleet("v100", last, 0, False, 15, 148)) == Resize(low=149)
    assert decide(Fleet("v100", last, 0, False, 15, 149)) == Resize(remove="b")
