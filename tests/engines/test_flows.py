"""Rates are weighted max-min fair, in exact fractions, whatever came and went before; no byte is lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.engines.flows import World


@dataclass(frozen=True)
class Flow:
    size: int
    links: Mapping[int, int]
    weight: int
    cap: int | None
    priority: int


def exact(capacities: list[int], flows: Mapping[int, Flow]) -> dict[int, Fraction]:
    """Rates by filling link by link in fractions: all flows of a priority rise, what first is full stays."""
    left = [Fraction(capacity) for capacity in capacities]
    rates: dict[int, Fraction] = {}
    for priority in sorted({flow.priority for flow in flows.values()}):
        rising = {number: flow for number, flow in flows.items() if flow.priority == priority}
        while rising:
            levels = [Fraction(flow.cap, flow.weight) for flow in rising.values() if flow.cap is not None]
            shares = [
                sum((flow.links.get(link, 0) * flow.weight for flow in rising.values()), Fraction(0))
                for link in range(len(left))
            ]
            levels += [left[link] / share for link, share in enumerate(shares) if share]
            level = min(levels)
            full = {link for link, share in enumerate(shares) if share and left[link] / share == level}
            for number, flow in list(rising.items()):
                own = flow.cap is not None and Fraction(flow.cap, flow.weight) == level
                if own or full & flow.links.keys():
                    rates[number] = level * flow.weight
                    del rising[number]
                    for link, times in flow.links.items():
                        left[link] -= times * rates[number]
    return rates


def close(figure: float, truth: Fraction | float, scale: float = 1.0) -> bool:
    return abs(figure - float(truth)) <= 1e-8 * max(scale, abs(float(truth)))


LINKS = 6
routes = st.dictionaries(st.integers(0, LINKS - 1), st.integers(1, 3), min_size=1, max_size=4)
flows_of = st.builds(
    Flow, size=st.integers(0, 1000), links=routes, weight=st.sampled_from([1, 1, 1, 2, 5]),
    cap=st.none() | st.integers(1, 60), priority=st.sampled_from([0, 0, 0, 1, 4]),
)  # fmt: skip
capacities_of = st.lists(st.integers(0, 100), min_size=LINKS, max_size=LINKS)
Changes = st.lists(
    st.tuples(st.sampled_from(["start", "start", "stop", "change", "resize", "advance"]), flows_of,
              st.integers(0, 100)),
    max_size=14,
)  # fmt: skip


def begin(world: World, flow: Flow, after: float = 0.0) -> int:
    cap = inf if flow.cap is None else float(flow.cap)
    return world.start(
        flow.size, flow.links, weight=flow.weight, cap=cap, priority=flow.priority, after=after
    )


@settings(max_examples=120, deadline=None)
@given(capacities_of, st.lists(flows_of, max_size=8), Changes)
def test_rates_are_exact_after_whatever_comes_goes_and_changes(
    capacities: list[int], first: list[Flow], changes: list[tuple[str, Flow, int]]
) -> None:
    world = World(capacities)
    here = {begin(world, flow): flow for flow in first}
    for kind, new, figure in [("look", None, 0), *changes]:
        old = sorted(here)[figure % len(here)] if here else None
        if kind == "start":
            here[begin(world, new)] = new
        elif kind == "resize":
            capacities = [*capacities]
            capacities[figure % LINKS] = new.size // 10
            world.set_capacity(figure % LINKS, new.size // 10)
        elif kind == "advance":
            for flow in world.advance(world.now + figure / 100):
                del here[flow]
        elif old is not None and kind == "stop":
            assert world.stop(old) <= here.pop(old).size
        elif old is not None and kind == "change":
            cap = inf if new.cap is None else float(new.cap)
            world.change(old, weight=new.weight, cap=cap, priority=new.priority)
            here[old] = Flow(here[old].size, here[old].links, new.weight, new.cap, new.priority)
        truth, rates = exact(capacities, here), world.rates()
        assert rates.keys() == truth.keys()
        assert all(close(rates[flow], truth[flow]) for flow in truth), (rates, truth)
        loads = world.loads()
        assert np.all(loads <= np.array(capacities) * (1 + 1e-8))
        for flow in here:  # a full link on which none of its class has a higher level, or its cap
            bottleneck = world.bottleneck(flow)
            if bottleneck is None:
                assert close(rates[flow], here[flow].cap or 0)
                continue
            assert close(loads[bottleneck], capacities[bottleneck])
            level = rates[flow] / here[flow].weight
            for other, rival in here.items():
                if bottleneck in rival.links and rival.priority == here[flow].priority:
                    assert rates[other] / rival.weight <= level + 1e-7
                if bottleneck in rival.links and rival.priority > here[flow].priority:
                    assert close(rates[other], 0)
    rates = world.rates()
    world.solve()
    assert all(close(rate, rates[flow]) for flow, rate in world.rates().items())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 100), min_size=LINKS, max_size=LINKS), st.lists(flows_of, min_size=1, max_size=8)
)
def test_all_bytes_arrive_and_every_end_is_when_the_rates_say(
    capacities: list[int], flows: list[Flow]
) -> None:
    world = World(capacities)
    here = {begin(world, flow): flow for flow in flows}
    left = {number: Fraction(flow.size) for number, flow in here.items()}
    now, moving, ends = Fraction(0), dict(here), {}
    while moving:
        done = [number for number in moving if left[number] == 0]
        if not done:
            rates = exact(capacities, moving)
            step = min(left[number] / rate for number, rate in rates.items() if rate)
            now += step
            left = {number: left[number] - step * rates.get(number, 0) for number in left}
            continue
        for number in done:
            ends[number] = now
            del moving[number]
    completed, times = world.run()
    assert sorted(completed) == sorted(ends)
    assert all(close(time, ends[flow]) for flow, time in zip(completed, times, strict=True))
    sums = [sum(flow.size * flow.links.get(link, 0) for flow in flows) for link in range(LINKS)]
    assert world.carried() == pytest.approx(sums, rel=1e-12)
    assert world.advance() == []


@settings(max_examples=40, deadline=None)
@given(capacities_of, st.lists(flows_of, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_neither_the_order_nor_a_link_cut_in_two_matters(
    capacities: list[int], flows: list[Flow], random: object
) -> None:
    world = World(capacities)
    rates = [world.rates()[number] for number in [begin(world, flow) for flow in flows]]
    order = list(range(len(flows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    other = World([*capacities, *capacities])  # link l is cut into l and l + LINKS
    numbers = {}
    for place in order:
        flow = flows[place]
        twice = {**flow.links, **{link + LINKS: times for link, times in flow.links.items()}}
        numbers[place] = begin(other, Flow(flow.size, twice, flow.weight, flow.cap, flow.priority))
        other.rates()
    assert all(close(other.rates()[numbers[place]], rates[place]) for place in order)


@settings(max_examples=40, deadline=None)
@given(capacities_of, st.lists(flows_of, min_size=1, max_size=6), st.lists(flows_of, max_size=6))
def test_a_lower_priority_takes_nothing_from_a_higher(
    capacities: list[int], high: list[Flow], low: list[Flow]
) -> None:
    world = World(capacities)
    numbers = [begin(world, Flow(flow.size, flow.links, flow.weight, flow.cap, 0)) for flow in high]
    alone = [world.rate(number) for number in numbers]
    for flow in low:
        begin(world, Flow(flow.size, flow.links, flow.weight, flow.cap, 1 + flow.priority))
    assert all(close(world.rate(number), rate) for number, rate in zip(numbers, alone, strict=True))


def test_a_large_world_solved_step_by_step_is_the_one_solved_at_once() -> None:
    rng = np.random.default_rng(7)
    world = World([100.0] * 60)
    waits = rng.exponential(1.0, 400)
    for wait in waits:
        links = rng.choice(60, 4, replace=False).tolist()
        world.start(float(rng.exponential(50.0)), links, weight=float(rng.integers(1, 4)), after=float(wait))
    ended = 0
    while done := world.advance():
        ended += len(done)
        before = world.rates()
        world.solve()
        assert world.rates() == pytest.approx(before, rel=1e-9)
        assert np.all(world.loads() <= 100.0 * (1 + 1e-8))
    assert ended == 400 and world.solves[0] >= 400


def test_a_solve_that_does_not_hold_is_found_out_and_made_anew() -> None:
    world = World([90.0] * 4)
    first = world.start(1e3, [0, 1])
    assert world.rate(first) == 90.0
    world._state.links["used"][1] = -1e9  # as if rounding had made this sum worthless
    later = [world.start(1e3, [1, link]) for link in (2, 3)]
    assert [world.rate(flow) for flow in [first, *later]] == pytest.approx([30.0, 30.0, 30.0])
    assert world.solves[0] == 3


def test_the_same_calls_give_the_same_bits() -> None:
    def run() -> tuple[list[int], bytes]:
        rng = np.random.default_rng(3)
        world = World([100.0] * 30)
        for _ in range(200):
            world.start(float(rng.integers(1, 9)), rng.choice(30, 3, replace=False).tolist())
        completed, times = world.run()
        return completed, times.tobytes()

    assert run() == run()


def test_flows_that_wait_time_and_are_stopped() -> None:
    world = World([10.0])
    first = world.start(100.0, [0])
    later = world.start(10.0, [0], after=4.0)
    timer = world.start(5.0, [], cap=1.0)
    endless = world.start(inf, [0], priority=1)
    assert world.rates() == {first: 10.0, later: 0.0, timer: 1.0, endless: 0.0}
    assert world.advance() == [timer] and world.now == 5.0
    assert world.left(first) == pytest.approx(55.0) and world.rate(later) == 5.0
    assert world.advance(5.5) == [] and world.now == 5.5
    assert world.stop(first) == pytest.approx(52.5)
    assert world.advance() == [later] and world.now == pytest.approx(5.75)
    assert world.rate(endless) == 10.0
    assert world.advance() == [] and world.now == pytest.approx(5.75)
    assert world.advance(6.75) == [] and world.carried() == pytest.approx([67.5])


def test_a_cap_over_several_flows_is_a_link_of_their_own() -> None:
    world = World([100.0, 100.0])
    (entity,) = world.add_links([30.0])
    held = [world.start(1e3, [link, entity]) for link in (0, 1)]
    free = [world.start(1e3, [link]) for link in (0, 1)]
    assert [world.rate(flow) for flow in held + free] == [15.0, 15.0, 85.0, 85.0]
    world.set_capacity(entity, 0.0)
    assert [world.rate(flow) for flow in held + free] == [0.0, 0.0, 100.0, 100.0]
    assert [world.bottleneck(flow) for flow in held] == [entity, entity]


def test_figures_out_of_range_are_refused_with_what_is_accepted() -> None:
    world = World([1.0])
    flow = world.start(1.0, [0])
    for call, words in (
        (lambda: World([-1.0]), "capacity -1.0 of a link: accepted are finite bytes/s from 0"),
        (lambda: world.set_capacity(0, inf), "capacity inf of link 0"),
        (lambda: world.start(-1.0, [0]), "size -1.0, after 0.0 of a flow"),
        (lambda: world.start(1.0, [1]), "link 1: there are links 0 to 0"),
        (lambda: world.start(1.0, {0: 0.0}), "some positive number of times"),
        (lambda: world.start(1.0, [0], weight=0.0), "weight 0.0, cap inf, priority 0 of a flow"),
        (lambda: world.start(1.0, [0], priority=-1), "priority -1 of a flow: accepted"),
        (lambda: world.start(1.0, []), "a flow without links needs a cap"),
        (lambda: world.change(flow, cap=-1.0), "weight 1.0, cap -1.0, priority 0"),
        (lambda: world.stop(9), "flow 9 is not under way"),
        (lambda: world.advance(-1.0), "until -1.0: accepted are times from 0.0"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    assert world.rates() == {flow: 1.0}
