"""Hosts full of sandboxes: cases worked out by hand, and what must hold in all."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.sandbox.twin.conftest import plain_costs
from parity import events, recorded
from parity.agents import decisions
from windtunnel.agents.sandbox.costs import SandboxCosts, load_costs
from windtunnel.agents.sandbox.model import TurnClass
from windtunnel.agents.sandbox.policy import POLICIES, CheckpointRequest, Notice, PolicyName, Restore
from windtunnel.agents.sandbox.policy.queues import CheckpointHistory, Queued
from windtunnel.agents.sandbox.twin import (
    PEEKED,
    SHARES,
    Session,
    TurnLoad,
    cost,
    effects_of,
    generate,
    sessions,
    starts,
)
from windtunnel.agents.sandbox.twin.world import (
    CheckpointJob,
    EmulatedHost,
    Loss,
    SandboxWorld,
    SessionsOutcome,
    TwinHost,
)
from windtunnel.engines.events import Environment, ProcessGenerator

ONE = EmulatedHost(cores=1, workers=1)


def turn(turn_class: TurnClass, think: float = 1.0, run: float = 1.0) -> TurnLoad:
    return TurnLoad(run, run, think, effects_of(turn_class))


def play(
    costs: SandboxCosts,
    policy: PolicyName,
    *played: Session,
    machine: EmulatedHost = ONE,
    begin: list[float] | None = None,
) -> SessionsOutcome:
    return SandboxWorld(machine, costs, policy, played, begin or [0.0] * len(played)).run()


def lost(costs: SandboxCosts, policy: PolicyName, session: Session, at: float, notice: float = 0.0) -> Loss:
    """What is lost with the host of one sandbox, which dies then, ``notice`` seconds after it was told."""
    world = SandboxWorld(EmulatedHost(), costs, policy, [session], [0.0])
    if notice:
        world.notice(0, at - notice, notice)
    world.kill(0, at)
    return world.run(at).losses[0]


def test_effects_of_a_class_are_decided_as_that_class() -> None:
    assert [turn(turn_class).turn_class for turn_class in TurnClass] == list(TurnClass)
    assert TurnLoad(0, 0, 0, effects_of(TurnClass.NONE, peeked=True)).turn_class is TurnClass.FULL


def test_a_checkpoint_within_the_think_time_costs_nothing(costs: SandboxCosts) -> None:
    outcome = play(costs, "semantic", (turn(TurnClass.FILES), turn(TurnClass.NONE)))
    assert outcome.ends == [4.0]
    assert outcome.gates == [0.0]
    assert (outcome.awaited, outcome.hidden) == (1, 1)
    assert [each.freeze for each in outcome.checkpoints] == [0.5]


def test_a_checkpoint_longer_than_the_think_time_makes_the_reply_wait(costs: SandboxCosts) -> None:
    outcome = play(costs, "semantic", (turn(TurnClass.FULL), turn(TurnClass.NONE)))
    assert outcome.gates == [1.0]
    assert outcome.ends == [5.0]
    assert (outcome.awaited, outcome.hidden) == (1, 0)


def test_nobody_waits_for_the_last_checkpoint(costs: SandboxCosts) -> None:
    outcome = play(costs, "full", (turn(TurnClass.FULL, think=0.5),))
    assert outcome.ends == [1.5]
    assert outcome.gates == []
    assert [each.at for each in outcome.checkpoints] == [3.0]


def test_commands_share_the_cpu() -> None:
    outcome = play(plain_costs(), "conversation", (turn(TurnClass.NONE),), (turn(TurnClass.NONE),))
    assert outcome.ends == [3.0, 3.0]


def test_who_is_waited_for_goes_first() -> None:
    # one worker; the first job runs until 3; the third sandbox's reply comes at 2, before the second's
    costs = plain_costs(full_freeze=2.0)
    played = [
        (turn(TurnClass.FULL, think=9.0), turn(TurnClass.NONE)),
        (turn(TurnClass.FULL, think=9.0), turn(TurnClass.NONE)),
        (turn(TurnClass.FULL, think=1.0), turn(TurnClass.NONE)),
    ]
    machine = EmulatedHost(cores=8, workers=1)
    assert max(play(costs, "full", *played, machine=machine).gates) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("policy", "kept"), [("conversation", 0), ("files", 1), ("full", 3), ("semantic", 3)]
)
def test_what_a_death_without_notice_leaves(costs: SandboxCosts, policy: PolicyName, kept: int) -> None:
    session = (
        turn(TurnClass.FILES, think=5),
        turn(TurnClass.FULL, think=5),
        turn(TurnClass.FILES, think=5),
        turn(TurnClass.NONE, think=5),
    )
    loss = lost(costs, policy, session, 17.0)
    assert (loss.turns, loss.covered) == (3, kept)
    # the turns end at 1, 7 and 13; thinking after a turn that is kept is not done again
    assert loss.seconds == {0: 13.0, 1: 12.0, 3: 0.0}[kept]


def test_a_death_within_a_checkpoint_leaves_the_one_before(costs: SandboxCosts) -> None:
    session = (turn(TurnClass.FULL, think=5), turn(TurnClass.FULL, think=5), turn(TurnClass.NONE))
    assert lost(costs, "semantic", session, 8.0).covered == 1


def test_a_notice_saves_what_no_checkpoint_covers(costs: SandboxCosts) -> None:
    session = (turn(TurnClass.FULL, think=50), turn(TurnClass.NONE))
    for seconds, kept in ((1.0, 0), (3.0, 1)):
        assert lost(costs, "conversation", session, 10.0 + seconds, seconds).covered == kept


def test_after_a_notice_no_command_starts(costs: SandboxCosts) -> None:
    session = tuple(turn(TurnClass.NONE) for _ in range(10))
    assert lost(costs, "semantic", session, 32.5, 30.0).turns == 2


SMALL = settings(max_examples=15, deadline=None)


@SMALL
@given(st.integers(0, 1000), st.integers(1, 12), st.sampled_from(sorted(POLICIES)))
def test_one_seed_has_one_outcome_and_all_work_is_done(seed: int, count: int, policy: PolicyName) -> None:
    costs = load_costs().costs
    played, begin = sessions(count, seed, turns=8), starts(count, seed, 20.0)
    machine = EmulatedHost(cores=2)
    outcomes = [SandboxWorld(machine, costs, policy, played, begin).run() for _ in range(2)]
    assert repr(outcomes[0]) == repr(outcomes[1])
    outcome = outcomes[0]
    commands = sum(turn.run_cpu for session in played for turn in session)
    assert outcome.cpu_served >= commands - 1e-6
    if policy == "conversation":
        assert outcome.cpu_served == pytest.approx(commands)
    for session, end in zip(played, outcome.ends, strict=True):
        assert end >= sum(turn.run_wall + turn.think for turn in session) - 1e-6
    kept = [keep for *_, keep in outcome.decided]
    assert len(kept) == sum(len(session) for session in played)
    assert len(outcome.checkpoints) == sum(keep.content > TurnClass.NONE for keep in kept)


def test_every_decision_has_a_price(tmp_path: Path) -> None:
    log = events(recorded("agents.sandbox", tmp_path))
    decided = [(observation, answer) for observation, answer, _ in decisions(log)]
    for observation, answer in decided:
        price = cost(observation, answer)
        if isinstance(observation, Queued | CheckpointHistory):
            assert price == {}
            continue
        assert price["seconds"] >= 0
        if isinstance(observation, CheckpointRequest):
            assert cost(observation, POLICIES["full"](observation))["seconds"] >= price["seconds"]
    (order,) = (pair for pair in decided if isinstance(pair[0], Notice))
    assert cost(*order)["seconds"] > 0
    with pytest.raises(TypeError, match="CheckpointPlan is no answer to Restore"):
        cost(
            next(observation for observation, _ in decided if isinstance(observation, Restore)), decided[0][1]
        )


def test_generated_turns_have_the_shares_that_are_said() -> None:
    turns = generate(4000, 7).turns
    assert generate(4000, 7).turns == turns
    quiet = [turn for turn in turns if turn.true_class is TurnClass.NONE]
    for turn_class, share in zip(TurnClass, SHARES, strict=True):
        assert sum(turn.true_class is turn_class for turn in turns) / 4000 == pytest.approx(share, abs=0.03)
    assert sum("peek" in turn.tags for turn in quiet) / len(quiet) == pytest.approx(PEEKED, abs=0.03)
    assert not any(turn.tags for turn in turns if turn.true_class is not TurnClass.NONE)
    assert turns[-1].think == 0 and all(0 < turn.think <= 600 for turn in turns[:-1])


def test_a_dropped_job_never_runs_and_frees_who_waits() -> None:
    env = Environment()
    host = TwinHost(env, ONE, plain_costs())
    ran: list[str] = []

    def job(name: str) -> ProcessGenerator:
        yield env.timeout(1.0)
        ran.append(name)

    first, second = (CheckpointJob(env, name, job(name)) for name in ("first", "second"))
    host.submit(first)
    host.submit(second)
    freed: list[float] = []
    second.done.callbacks.append(lambda event: freed.append(env.now))
    assert host.drop(second)
    assert not host.drop(first)
    env.run()
    assert (ran, freed) == (["first"], [0.0])
