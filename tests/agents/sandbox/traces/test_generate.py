"""Generated sessions: valid for any seed, and true to their word when they are run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.agents.sandbox.model import TurnClass
from windtunnel.agents.sandbox.traces.generate import Mix, generate
from windtunnel.agents.sandbox.traces.replay import begin, check, replay
from windtunnel.agents.sandbox.traces.schema import load, save
from windtunnel.agents.sandbox.traces.score import least
from windtunnel.base.errors import UserError

EVEN = Mix(none=1, shell=1, files=1, full=1)
WEIGHT = st.floats(0, 10)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32), turns=st.integers(1, 60), weights=st.tuples(WEIGHT, WEIGHT, WEIGHT, WEIGHT)
)
def test_any_seed_gives_a_trace_that_survives_its_file(
    seed: int, turns: int, weights: tuple[float, float, float, float], tmp_path_factory: Any
) -> None:
    if not any(weights):
        weights = (1, 0, 0, 0)
    trace = generate(turns, seed, Mix(*weights))
    assert trace == generate(turns, seed, Mix(*weights))
    assert len(trace.turns) == turns
    assert {turn.true_class for turn in trace.turns} <= {
        one for one, weight in zip(TurnClass, weights, strict=True) if weight
    }
    path = tmp_path_factory.mktemp("trace") / "one.jsonl"
    save(trace, path)
    assert load(path) == trace


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_runs_as_it_says_and_the_referee_never_finds_more(
    seed: int, new_box: Callable[[], Any], first_port: int
) -> None:
    for program in ("git", "python3"):
        if not shutil.which(program, path="/usr/bin:/bin"):
            pytest.skip(f"needs {program}")
    box = new_box()
    trace = generate(45, seed, EVEN, workdir=str(box.workdir), first_port=first_port)
    state = []

    def full_look() -> Any:
        seen = box.look()
        pids = frozenset(box.processes())
        return type(seen)(
            tree=seen.tree, processes=seen.processes, pids=pids, shells={"main": box.shell_print()}
        )

    def on_turn(turn: Any, output: Any) -> None:
        after = full_look()
        truth = least(state[-1], after)[0]
        # what the referee sees is never more than the true class, and of shells and files all of it
        assert truth <= turn.true_class, (turn, least(state[-1], after))
        if turn.true_class in (TurnClass.SHELL, TurnClass.FILES):
            assert truth == turn.true_class, turn
        state.append(after)

    begin(trace, box)
    state.append(full_look())
    assert check(trace, replay(trace, box, on_turn=on_turn, opening=False)) == []
    assert len(state) == len(trace.turns) + 1


def test_services_are_told_by_probes(new_box: Callable[[], Any], first_port: int) -> None:
    box = new_box()
    trace = generate(
        25, 5, Mix(none=0, shell=0, files=0, full=1), workdir=str(box.workdir), first_port=first_port
    )
    outputs = replay(trace, box)
    assert check(trace, outputs) == []
    seen = box.look(tuple(outputs), dict(trace.probes))
    assert all(said.startswith("0 ") for said in seen.probes.values())


def test_weights_rule_the_shares() -> None:
    classes = [turn.true_class for turn in generate(2000, 7).turns]
    assert 0.70 < classes.count(TurnClass.NONE) / 2000 < 0.80
    assert None not in classes


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: generate(0), "turns 0"),
        (lambda: generate(5, first_port=80), "first port 80"),
        (lambda: Mix(none=-1), "weights"),
        (lambda: Mix(0, 0, 0, 0), "one is not 0"),
        (lambda: Mix(ballast=-1), "ballast -1"),
        (lambda: Mix(none=float("nan")), "weights"),
    ],
)
def test_bad_parameters_are_sentences(make: Callable[[], object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        make()


def test_think_times_never_end_a_session(tmp_path: Path) -> None:
    trace = generate(30, 3)
    assert trace.turns[-1].think == 0.0
    assert all(0 < turn.think <= 600 for turn in trace.turns[:-1])
