"""Extra branches: nobody's slack is broken by what is predicted, and nobody is left out who need not be."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.serving.branching.policy import BANK, POLICIES, BranchCandidate, Observation
from windtunnel.serving.branching.policy.predictor import RECENT, SPANS, Predictor
from windtunnel.serving.engine.model import StepTime

TIME = StepTime(base=0.01, row=1e-3, kv=1e-6, token=3e-4, pair=1e-7)


@st.composite
def observations(draw: st.DrawFn) -> Observation:
    requests = range(draw(st.integers(1, 6)))
    candidates = []
    for number in requests:
        for unit in range(2, 2 + draw(st.integers(0, 4))):
            candidates.append(
                BranchCandidate(number, unit, draw(st.integers(0, 2000)), draw(st.integers(1, 50)))
            )
    promised = tuple(number for number in requests if draw(st.booleans()))
    return Observation(
        now=draw(st.floats(0, 100)),
        rows=len(requests),
        read=draw(st.integers(0, 5000)),
        prefill=draw(st.sampled_from([(), ((64, 500),)])),
        requests=promised,
        slacks=tuple(draw(st.floats(-0.05, 0.15)) for _ in promised),
        paces=tuple(draw(st.sampled_from([0.0, 0.004, 0.03])) for _ in promised),
        left=tuple(draw(st.integers(0, 200)) for _ in promised),
        beside=tuple(draw(st.sampled_from([0, 1, 3, 150])) for _ in promised),
        candidates=tuple(draw(st.permutations(candidates))),
        room=draw(st.integers(0, 20)),
        time=TIME,
        gain=draw(st.floats(0.5, 2)),
        margins=draw(st.sampled_from([(), (0.4,), (0.5, 0.3, 0.2, 0.0), (0.1,) * 5 + (0.3,)])),
        widths=draw(st.sampled_from([(), (1.0, 1.1, 0.9, 1.3)])),
        rho=draw(st.floats(0.1, 1)),
    )


def with_these(observation: Observation, units: tuple[tuple[int, int], ...]) -> float:
    read = sum(
        candidate.suffix
        for candidate in observation.candidates
        if (candidate.request, candidate.unit) in units
    )
    return observation.predicted(observation.rows + len(units), observation.read + read)


def over(observation: Observation, steps: int) -> float:
    """The margin of so many steps in a row: of 1, 2 to 3, 4 to 7, …, the last for all above."""
    place = next(at for at in range(9) if steps < 2 << at)
    return (*observation.margins, *(observation.margins[-1:] or (0.0,)) * 9)[place]


def allowed(observation: Observation) -> float:
    """What a step may cost above the protected rows, seconds: by hand, request by request."""
    narrow = with_these(replace(observation, prefill=()), ())
    base, spans = with_these(observation, ()), []
    own = {candidate.request for candidate in observation.candidates}
    for number, slack, pace, left, beside in zip(
        observation.requests,
        observation.slacks,
        observation.paces,
        observation.left,
        observation.beside,
        strict=True,
    ):
        slack += pace * min(beside, BANK)
        steps = min(left, BANK)
        at_worst = 1 + over(observation, steps)
        if slack / at_worst > base:
            spans.append(slack / at_worst - base)
        elif number in own:
            continue
        elif slack + steps * pace > at_worst * (base + steps * narrow):
            spans.append(0.0)
    return min(spans, default=inf)


@settings(max_examples=200, deadline=None)
@given(observations())
def test_a_step_breaks_the_slack_of_nobody(observation: Observation) -> None:
    decision, base = POLICIES["taper"](observation), with_these(observation, ())
    assert decision.budget == pytest.approx(allowed(observation), abs=1e-12)
    assert decision.predicted == with_these(observation, decision.admitted)
    assert decision.externality == decision.predicted - base <= observation.rho * decision.budget
    for slack, pace, left, beside in zip(
        observation.slacks, observation.paces, observation.left, observation.beside, strict=True
    ):
        to_come = pace * min(beside, BANK)
        at_worst = 1 + over(observation, min(left, BANK))
        if slack + to_come > base * at_worst + 1e-12:
            assert decision.predicted * at_worst <= slack + to_come + 1e-12
    assert len(set(decision.admitted)) == len(decision.admitted) <= max(0, observation.room)
    assert set(decision.admitted) <= {
        (candidate.request, candidate.unit) for candidate in observation.candidates
    }


@settings(max_examples=150, deadline=None)
@given(observations())
def test_no_wider_step_in_the_same_order_would_do(observation: Observation) -> None:
    """The order is that of who has all the slack; of its beginnings the longest that harms nobody."""
    free = replace(observation, slacks=(inf,) * len(observation.slacks))
    order = POLICIES["taper"](free).admitted
    assert len(order) == min(observation.room, len(observation.candidates))
    admitted = POLICIES["taper"](observation).admitted
    assert admitted == order[: len(admitted)]
    base = with_these(observation, ())
    for more in range(len(admitted) + 1, len(order) + 1):
        wider = order[:more]
        assert with_these(observation, wider) - base > observation.rho * allowed(observation) - 1e-12
    rounds = Counter(number for number, _ in order)
    for number, count in rounds.items():  # in turn: nobody has two more than another who has one left
        had = sum(candidate.request == number for candidate in observation.candidates)
        assert count == had or all(count >= other - 1 for other in rounds.values())


def test_zero_slack_is_zero_width_and_who_is_late_for_good_forbids_nothing() -> None:
    branches = tuple(BranchCandidate(1, unit, 0, 10) for unit in (2, 3, 4))
    base = TIME.of(2, 0)
    observation = Observation(
        0, 2, 0, (), (0, 1), (base + 1e-9, 1.0), (0.05, 0.05), (9, 9), (0, 0), branches, 9, TIME
    )
    taper = POLICIES["taper"]
    assert taper(observation).admitted == ()
    assert len(taper(replace(observation, slacks=(inf, 1.0))).admitted) == 3
    late = replace(observation, slacks=(base - 9 * (0.05 - base), 1.0))  # nine tokens do not make up for it
    assert len(taper(late).admitted) == 3
    assert taper(replace(late, left=(10, 9))).admitted == ()
    # now the one without slack is the one that branches
    tight = replace(observation, slacks=(1.0, base + 1e-9))
    for beside, wide in ((0, 0), (1, 3), (30, 3)):
        bears = replace(tight, beside=(0, beside))
        assert len(taper(bears).admitted) == wide
    caught = replace(tight, slacks=(1.0, base - 0.01), left=(9, 99))  # late, and its branches bring it back
    assert len(taper(caught).admitted) == 3


@settings(max_examples=50, deadline=None)
@given(observations())
def test_off_takes_no_extra_branch_and_eager_all(observation: Observation) -> None:
    assert POLICIES["off"](observation).admitted == ()
    assert len(POLICIES["eager"](replace(observation, room=99)).admitted) == len(observation.candidates)
    assert len(POLICIES["eager"](observation).admitted) == min(
        max(0, observation.room), len(observation.candidates)
    )


def test_the_predictor_learns_gain_widths_and_margins_that_95_percent_keep() -> None:
    random, predictor = np.random.default_rng(3), Predictor()
    for _ in range(4000):
        rows = int(random.choice([1, 8, 64]))
        actual = 2.0 * (1.3 if rows == 64 else 1.0) * (1 + 0.05 * random.standard_normal())
        predictor.measured(rows, 0.01, 0.01 * actual)

    def expected(rows: int) -> float:
        width = replace(SEEN, widths=predictor.widths, gain=predictor.gain)
        return width.predicted(rows, 0) / TIME.of(rows, 0)

    for rows, ratio in ((1, 2.0), (8, 2.0), (64, 2.6)):
        assert abs(expected(rows) / ratio - 1) < 0.05
    first, *_, most = predictor.margins
    assert 0.05 < first < 0.14 and most < 0.4 * first and len(predictor.margins) == len(SPANS)
    gain = predictor.gain
    predictor.measured(8, 0.01, 60.0)  # the host stood still
    assert predictor.gain < 1.2 * gain
    for _ in range(RECENT):
        predictor.measured(8, 0.01, 0.01 * expected(8))
    assert max(predictor.margins) < 1e-9
    for _ in range(2 * RECENT):  # from now on all take twice as long: nothing cancels out
        predictor.measured(8, 0.01, 0.04)
    assert max(predictor.margins) < 1e-2  # and that is what is expected


def test_who_has_many_tokens_to_come_needs_no_margin_of_a_single_step() -> None:
    """The slack is that of 1.4 wide steps: too little for one that takes half as long again."""
    slack = 1.4 * TIME.of(3, 0)
    observation = replace(SEEN, rows=2, requests=(0,), slacks=(slack,), paces=(0.05,), beside=(0,), rho=1.0)
    observation = replace(
        observation, candidates=(BranchCandidate(1, 2, 0, 10),), room=9, margins=(0.5, 0.45, 0.42, 0.1)
    )
    for left, taken in ((1, 0), (4, 0), (8, 1), (64, 1)):
        assert len(POLICIES["taper"](replace(observation, left=(left,))).admitted) == taken


SEEN = Observation(0, 1, 0, (), (), (), (), (), (), (), 0, TIME)
