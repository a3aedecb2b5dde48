"""Questions and their answers: searches, bounds and the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from windtunnel.agents.sandbox.costs import load_costs
from windtunnel.agents.sandbox.policy import POLICIES
from windtunnel.agents.sandbox.twin.questions import (
    EmulationSetting,
    breaking,
    density,
    search,
    spot,
)  # fmt: skip
from windtunnel.agents.sandbox.twin.world import EmulatedHost
from windtunnel.base.errors import UserError
from windtunnel.cli.sandbox.emulate import emulate


@given(st.integers(1, 80), st.integers(1, 64))
def test_the_search_finds_the_first_density_that_breaks(breaks_at: int, most: int) -> None:
    bounds = search(lambda number: number >= breaks_at, most)
    assert bounds == ((most, None) if breaks_at > most else (breaks_at - 1, breaks_at))


def test_dear_checkpoints_break_earlier_than_cheap_ones() -> None:
    cheap = EmulationSetting(EmulatedHost(cores=2), load_costs().costs, turns=8)
    dear = replace(cheap, costs=replace(cheap.costs, full_freeze=2.0))
    few = breaking(dear, "full", 32)
    assert few.bears < breaking(cheap, "full", 32).bears
    assert few.breaks == few.bears + 1
    assert density(dear, "full", few.breaks).broken
    assert not density(dear, "semantic", 1).broken or few.bears == 0


def test_no_checkpoints_no_overhead() -> None:
    load = density(EmulationSetting(EmulatedHost(cores=2), load_costs().costs, turns=6), "conversation", 4)
    assert (load.overhead, load.gate_p99, load.checkpoints) == (0.0, 0.0, 0)


def test_what_a_notice_saves_and_what_nothing_saves() -> None:
    setting = EmulationSetting(EmulatedHost(cores=4), load_costs().costs, turns=12)
    rows = {
        (row.policy, row.notice): row
        for row in spot(setting, ["conversation", "semantic"], (0.0, 120.0), 4, trials=3)
    }
    assert rows["conversation", 0.0].turns_lost > rows["semantic", 0.0].turns_lost
    assert rows["conversation", 120.0].turns_lost == 0
    assert rows["semantic", 120.0].saved == 1.0


def command(*arguments: str) -> Any:
    group = typer.Typer()
    group.callback()(lambda: None)
    group.command("emulate")(emulate)
    return CliRunner().invoke(group, ["emulate", *arguments])


SMALL = ("--hosts", "2", "--cores", "2", "--density", "1,2", "--turns", "4", "--notice", "30")


def test_the_command_says_that_it_is_emulated_and_from_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    monkeypatch.setattr("windtunnel.agents.sandbox.twin.questions.MOST", 4)
    result = command(*SMALL)
    assert result.exit_code == 0, result.output
    for word in (
        "Emulated, not measured",
        "shipped profile",
        "semantic",
        "A host goes (emulated)",
    ):
        assert word in result.output


def test_the_same_seed_gives_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windtunnel.agents.sandbox.twin.questions.MOST", 4)
    first, second = (command(*SMALL, "--json").stdout for _ in range(2))
    assert first == second
    summary = json.loads(first[first.index("{") :])
    assert summary["emulated"] is True
    assert {row["policy"] for row in summary["densities"]} == set(POLICIES)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--density", "0"), "density"),
        (("--density", "a,b"), "density"),
        (("--notice", "-1"), "notice"),
        (("--policy", "none"), "policy"),
        (("--memory", "0"), "memory"),
        (("--run", "nan"), "run"),
    ],
)
def test_bad_input_is_named(arguments: tuple[str, str], word: str) -> None:
    result = command(*arguments)
    assert isinstance(result.exception, UserError)
    assert word in str(result.exception)
