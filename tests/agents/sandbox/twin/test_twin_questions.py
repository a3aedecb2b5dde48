"""Questions and their answers: searches, bounds, pages and the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from plain_costs import plain_costs
from typer.testing import CliRunner

from windtunnel.agents.sandbox.costs import SandboxCosts, load_costs
from windtunnel.agents.sandbox.model import (
    FilesPart,
    ImagePart,
    Manifest,
    SandboxSpec,
    TurnClass,
)
from windtunnel.agents.sandbox.policy import Keep, Look, Occasion, Retention
from windtunnel.agents.sandbox.twin import questions
from windtunnel.agents.sandbox.twin.answers import fanout, growth
from windtunnel.agents.sandbox.twin.hosts import ARMS, EmulatedHost, Made
from windtunnel.agents.sandbox.twin.loads import effects_of
from windtunnel.agents.sandbox.twin.observed import ObservedBox, ObservedRun, ObservedTurn, validate
from windtunnel.agents.sandbox.twin.questions import (
    Density,
    Setting,
    breaking,
    density,
    failures,
    powers,
    spot,
)
from windtunnel.base.errors import UserError
from windtunnel.cli.sandbox.emulate import emulate


def row(number: int, breaks_at: int) -> Density:
    overhead = 0.5 if number >= breaks_at else 0.0
    return Density("any", number, overhead, 0, 0, 0, 1, 0, 0, 0, 0, True)


@given(st.integers(1, 80), st.integers(1, 64))
def test_the_search_finds_the_first_density_that_breaks(breaks_at: int, most: int) -> None:
    found = questions._search(lambda number: row(number, breaks_at), "any", most, 0)
    if breaks_at > most:
        assert (found.bears, found.breaks) == (most, None)
    else:
        assert (found.bears, found.breaks) == (breaks_at - 1, breaks_at)


def test_dear_checkpoints_break_earlier_than_cheap_ones() -> None:
    cheap = Setting(EmulatedHost(cores=2), load_costs().costs, turns=8)
    dear = replace(cheap, costs=replace(cheap.costs, full_freeze=2.0))
    few = breaking(dear, ARMS["full"], 32)
    assert few.bears < breaking(cheap, ARMS["full"], 32).bears
    assert few.breaks == few.bears + 1
    assert density(dear, ARMS["full"], few.breaks).broken
    assert not density(dear, ARMS["semantic"], 1).broken or few.bears == 0


def test_no_checkpoints_no_overhead() -> None:
    found = density(Setting(EmulatedHost(cores=2), load_costs().costs, turns=6), ARMS["conversation"], 4)
    assert (found.overhead, found.gate_p99, found.checkpoints) == (0.0, 0.0, 0)


def test_what_a_notice_saves_and_what_nothing_saves() -> None:
    setting = Setting(EmulatedHost(cores=4), load_costs().costs, turns=12)
    rows = {
        (one.policy, one.notice): one
        for one in spot(setting, [ARMS["conversation"], ARMS["semantic"]], (0.0, 120.0), 4, trials=3)
    }
    assert rows["conversation", 0.0].turns_lost > rows["semantic", 0.0].turns_lost
    assert rows["conversation", 120.0].turns_lost == 0
    assert rows["semantic", 120.0].saved == 1.0


def test_failures_stretch_what_keeps_nothing_most() -> None:
    setting = Setting(EmulatedHost(cores=4), load_costs().costs, hosts=2, turns=12)
    nothing, semantic = failures(setting, [ARMS["conversation"], ARMS["semantic"]], 4, 0.005)
    assert nothing.deaths > 0
    assert nothing.turns_again > semantic.turns_again
    assert nothing.stretch > semantic.stretch


def test_forks_by_hand() -> None:
    costs = plain_costs(restore=1.0, fork=1.0, new_per_byte=1.0, disk_lanes=100)
    machine = EmulatedHost(cores=4, network=10.0, workers=2)
    one = fanout(machine, costs, 4, 1, memory=20, processes=0)
    assert (one.first, one.median, one.last) == (2.0, 2.0, 4.0)
    # the second host waits 2 s for 20 bytes
    two = fanout(machine, costs, 4, 2, memory=20, processes=0)
    assert (two.first, two.last) == (2.0, 4.0)


@given(st.integers(1, 300))
def test_powers_end_with_the_most(most: int) -> None:
    found = powers(most)
    assert found[0] == 1
    assert found[-1] == most
    assert found == sorted(set(found))


def made(turn: int, turn_class: TurnClass, written: float) -> Made:
    return Made(0, turn, turn_class, float(turn), 0.0, 0.0, written, 100.0)


def test_the_store_forgets_what_retention_lets_go_of(costs: SandboxCosts) -> None:
    costs = replace(costs, new_per_byte=1.0)
    events = [made(number, TurnClass.FULL, 100.0 if number == 1 else 10.0) for number in range(1, 41)]
    rows = growth("full", events, costs, Retention(keep=10))
    # the oldest of ten is whole, and nine hold what changed
    assert rows[-1].checkpoints == 10
    assert rows[-1].stored == 100 + 9 * 10
    assert rows[-1].written == 100 + 39 * 10


def test_an_image_stays_as_long_as_a_checkpoint_names_it(costs: SandboxCosts) -> None:
    costs = replace(costs, new_per_byte=1.0)
    events = [made(1, TurnClass.FULL, 100.0)]
    events += [made(number, TurnClass.FILES, 1.0) for number in range(2, 31)]
    rows = growth("semantic", events, costs, Retention(keep=10))
    assert rows[-1].stored == 100 + 10


def seen(turn_class: TurnClass) -> tuple[Look, Keep]:
    return Look(Occasion.TURN, effects_of(turn_class)), Keep(turn_class, turn_class)


def measured(gate: float, total: float) -> ObservedRun:
    image = ImagePart("m", 1, ("init", "bash", "python3"), (), (), 0, 0)
    manifest = Manifest(
        "m",
        "b",
        1,
        None,
        TurnClass.FULL,
        TurnClass.FULL,
        (),
        0.0,
        FilesPart("m", "copy"),
        image,
        (),
        SandboxSpec("b"),
        (),
        (),
        1.0,
        2.0,
    )
    turns = (
        ObservedTurn(1.0, 1.0, 1.0, *seen(TurnClass.FULL), gate, "m"),
        ObservedTurn(1.0, 1.0, 1.0, *seen(TurnClass.NONE), None),
    )
    return ObservedRun(1, 1, "semantic", (ObservedBox(0.0, total, turns, (manifest,)),))


def test_a_run_that_went_as_the_twin_says_is_valid(costs: SandboxCosts) -> None:
    rows = validate([measured(1.0, 5.0)], costs)
    assert {one.what: one.error for one in rows} == {
        "total seconds, mean": 0.0,
        "gate wait, mean": 0.0,
        "gate wait, p95": 0.0,
        "freeze, p95": 0.0,
    }


def test_a_run_that_went_otherwise_is_told(costs: SandboxCosts) -> None:
    rows = {one.what: one for one in validate([measured(0.5, 10.0)], costs)}
    assert not rows["total seconds, mean"].holds
    assert rows["total seconds, mean"].error == pytest.approx(0.5)
    assert rows["gate wait, p95"].error == pytest.approx(1.0)


def command(*arguments: str) -> Any:
    group = typer.Typer()
    group.callback()(lambda: None)
    group.command("emulate")(emulate)
    return CliRunner().invoke(group, ["emulate", *arguments])


SMALL = ("--hosts", "2", "--cores", "2", "--density", "1,2", "--turns", "4", "--notice", "30", "--forks", "4")


def test_the_command_says_that_it_is_emulated_and_from_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    monkeypatch.setattr("windtunnel.agents.sandbox.twin.answers.MOST", 4)
    page = tmp_path / "page.html"
    found = command(*SMALL, "--mtbf", "0.001", "--html", str(page))
    assert found.exit_code == 0, found.output
    for word in (
        "Emulated, not measured",
        "shipped profile",
        "semantic",
        "Hosts die at random (emulated)",
        "Forks of one checkpoint (emulated)",
    ):
        assert word in found.output
    text = page.read_text()
    assert "Every figure is emulated" in text
    assert text.count("plotly-graph-div") == 7
    assert "<script src" not in text


def test_the_same_seed_gives_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windtunnel.agents.sandbox.twin.answers.MOST", 4)
    first, second = (command(*SMALL, "--json").stdout for _ in range(2))
    assert first == second
    found = json.loads(first[first.index("{") :])
    assert found["emulated"] is True
    assert {one["policy"] for one in found["densities"]} == set(ARMS)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--mtbf", "0"), "mtbf"),
        (("--density", "0"), "density"),
        (("--density", "a,b"), "density"),
        (("--notice", "-1"), "notice"),
        (("--policy", "none"), "policy"),
        (("--memory", "0"), "memory"),
        (("--run", "nan"), "run"),
    ],
)
def test_bad_input_is_named(arguments: tuple[str, str], word: str) -> None:
    found = command(*arguments)
    assert isinstance(found.exception, UserError)
    assert word in str(found.exception)
