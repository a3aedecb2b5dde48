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
        one = variant(
            f"net{draw(st.integers(0, 1))}:{number}", slope=draw(st.sampled_from((0.001, 0.01, 0.1))),
            batch=draw(st.sampled_from((1, 8))), accuracy=draw(st.sampled_from((0.5, 0.9))),
            hardware=draw(st.sampled_from(("cpu", "v100"))), load=draw(st.sampled_from((0.1, 5.0))),
        )  # fmt: skip
        states = draw(st.lists(st.sampled_from(("active", "overloaded", "interfered")), max_size=2))
        wait = draw(st.sampled_from((0.0, 0.05, 2.0)))
        candidates.append(VariantCandidate(one, tuple(
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
    recent = draw(st.lists(st.sampled_from([one.variant.name for one in candidates] or ["x"]), max_size=3))
    waiting = draw(st.sampled_from((0, QUEUE)))
    return VariantQuery(query, tuple(candidates), hosts, tuple(recent), waiting=waiting)


@settings(max_examples=60, deadline=None)
@given(asked(), st.sampled_from(sorted(POLICIES)))
def test_who_answers_can_and_is_loaded_and_unflagged_where_one_is(seen: VariantQuery, policy: str) -> None:
    made = POLICIES[policy](seen)
    by_name = {one.variant.name: one for one in seen.candidates}
    fit = [one for one in seen.candidates if feasible(seen.query, one.variant)]
    assert isinstance(made, QueryRefused) == (not fit)
    if not isinstance(made, Chosen):
        assert isinstance(made, QueryRefused) and made.reason
        return
    chosen = by_name[made.variant]
    assert chosen in fit
    calm = [
        held for one in fit for held in one.replicas
        if held.state == "active" and held.wait + one.variant.latency(4) < 0.8 * seen.query.latency
    ]  # fmt: skip
    if calm:
        held = next(held for held in chosen.replicas if held.host == made.host)
        assert held.state == "active" and not made.load and not made.need
        assert held.wait + chosen.variant.latency(seen.query.items) <= seen.query.latency
    takes = [held.answers(one.variant, seen.query.items) for one in fit for held in one.replicas]
    if made.shed and seen.query.latency < math.inf:  # nobody who could be in time is
        assert made.shed >= 1 and min(takes, default=math.inf) > seen.query.latency
    elif seen.query.latency == math.inf:
        assert (made.shed > 0) == (seen.waiting == QUEUE)
    elif not made.load:  # and all who could not be
        takes = [
            one.answers(chosen.variant, seen.query.items) for one in chosen.replicas if one.host == made.host
        ]
        assert takes[0] <= seen.query.latency
    if made.load:
        host = next(one for one in seen.hosts if one.name == made.host) if made.host else None
        assert not chosen.replicas
        assert host is None or (host.hardware, host.free >= GIB) == (chosen.variant.hardware, True)
        assert made.need == (host is None)


def test_what_is_loaded_is_what_the_policy_says() -> None:
    quick = variant("net:1", load=1.0, price=1.0)
    cheap = variant("net:8", load=3.0, price=2.0, batch=8, slope=0.002)
    held = HostReplicas(HOST.name, "active", 1, wait=9.0)

    def after(policy: str, *candidates: VariantCandidate) -> tuple[str, bool]:
        made = POLICIES[policy](VariantQuery(Query(0, "digits", latency=0.05), candidates, (HOST,)))
        assert isinstance(made, Chosen)
        return made.variant, made.load

    nothing = VariantCandidate(quick), VariantCandidate(cheap)
    assert after("infaas", *nothing) == ("net:1", True)
    assert after("cheapest", *nothing) == ("net:8", True)
    late = VariantCandidate(cheap, (held,))
    assert after("infaas", VariantCandidate(quick), late) == ("net:1", True)
    assert after("cheapest", VariantCandidate(quick), late) == ("net:8", False)
    made = decide(VariantQuery(Query(0, "digits", latency=0.05), (late,), (HOST,)))
    assert isinstance(made, Chosen) and made.shed == 9.0 + 0.004 - 0.05
    assert made.reason == "digits: shed, since net:8 would take 9 s; ask again in 9 s"


def test_what_cannot_be_done_is_refused_with_the_nearest() -> None:
    seen = VariantQuery(
        Query(0, "digits", accuracy=0.95, latency=0.5), (VariantCandidate(variant()),), (HOST,)
    )
    made = decide(seen)
    assert isinstance(made, QueryRefused)
    assert made.reason == (
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
    one = variant(batch=most)
    items, slack = zip(*waiting, strict=True)
    made = decide(Waiting(one, items, slack, slow=slow))
    assert isinstance(made, Batch)
    lost = {place for place, (count, left) in enumerate(waiting) if left < one.latency(count) * slow}
    kept = [each for place, each in enumerate(waiting) if place not in made.shed]
    assert lost <= {*made.shed} and min(1, len(kept)) <= made.requests <= len(kept)
    inside = kept[: made.requests]
    total = sum(count for count, _ in inside)
    assert made.requests <= 1 or total <= most
    alone = decide(Waiting(one, items, slack, slow=slow, busy=True))
    assert alone == Batch(0, tuple(sorted(lost)))
    if {*made.shed} > lost:  # who would be in time alone goes only where more are answered by that
        left = [each for place, each in enumerate(waiting) if place not in lost]
        counts = itertools.accumulate(count for count, _ in left)
        leasts = itertools.accumulate((time for _, time in left), min)
        sums = zip(counts, leasts, strict=True)
        first = sum(count <= most and time >= one.latency(count) * slow for count, time in sums)
        assert made.requests >= first
    assert all(left >= one.latency(total) * slow for _, left in inside)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(LEGAL)), st.integers(0, 3), st.floats(0, 500), st.floats(0, 2),
    st.integers(0, 1000), st.sampled_from(("cpu", "v100")),
)  # fmt: skip
def test_states_change_only_as_they_may(
    state: str, replicas: int, rate: float, latency: float, outstanding: int, hardware: str
) -> None:
    seen = Measured(variant(hardware=hardware), state, replicas, rate, latency, 1.0, outstanding)  # type: ignore[arg-type]
    made = decide(seen)
    assert isinstance(made, Now)
    assert made.state == state or made.state in LEGAL[seen.state]
    assert (made.state == "inactive") == (replicas == 0)


def test_flags_are_raised_and_taken_back() -> None:
    one = variant()  # 83 items a second

    def after(state: str, **other: object) -> str:
        made = decide(Measured(one, state, 2, **other))  # type: ignore[arg-type]
        assert isinstance(made, Now)
        return made.state

    assert after("active", outstanding=150) == "overloaded"
    assert after("active", rate=60.0, latency=0.05) == "interfered"
    assert after("active", rate=9.0, latency=0.05) == "active"  # slow, but hardly asked
    assert after("active", rate=20.0, latency=0.2) == "interfered"  # beside what leaves it little of a core
    assert after("overloaded", outstanding=20) == "active"
    assert after("interfered", rate=60.0, latency=0.02) == "interfered"
    assert after("interfered", rate=60.0, latency=0.013) == "active"


def scaled(load: Load) -> Scaling:
    made = decide(load)
    assert isinstance(made, Scaling)
    return made


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
    made = scaled(Load(full, (Running(small, 1, 150.0),), elsewhere=(other,)))
    assert made == Scaling((ReplicaChange("net:1", 1, "b"),), (0,))
    for policy in ("no-upgrade", "individual"):
        made = POLICIES[policy](Load(HOST, (Running(small, 1, 230.0),), (large,)))
        assert isinstance(made, Scaling) and made.changes == (ReplicaChange("net:1", 2),)
    assert POLICIES["static"](Load(HOST, (Running(small, 1, 230.0),))) == Scaling((), (0,), False)


def test_less_comes_only_after_votes_and_a_constant_load_changes_nothing() -> None:
    small, large = variant(), variant("net:8", batch=8, slope=0.002, price=2.0)
    votes, changes = 0, []
    for second in range(600):
        made = scaled(Load(HOST, (Running(large, 1, 30.0, votes=votes),), (small,)))
        votes = made.votes[0]
        changes += [(second, one) for one in made.changes]
        if changes:
            break
    assert changes == [(9, ReplicaChange("net:1", 1)), (9, ReplicaChange("net:8", -1))]
    tight = ReplicaHost("a", "cpu", 8, GIB)
    for host, rate, gone in ((HOST, 0.01, False), (tight, 0.01, True), (tight, 1.0, False)):
        made = scaled(Load(host, (Running(small, 1, rate, votes=9),)))
        assert bool(made.changes) == gone
    for rate in (10.0, 70.0, 79.0, 158.0):  # over ten minutes each
        replicas, votes, changed = 1, 0, 0
        for _ in range(600):
            made = scaled(Load(HOST, (Running(small, replicas, rate, votes=votes),), (large,)))
            votes = made.votes[0]
            mine = [one for one in made.changes if one.variant == "net:1"]
            replicas += sum(one.replicas for one in mine)
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
