"""One policy, two worlds: what each capability recorded is decided anew, was done, and its twin decides it.

The logs lie in ``parity/recorded``, and ``make record`` makes them anew. That a changed rule is found out is
shown by ``make mutants``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mutants import ROOT, mutants, mutated
from parity import (
    AREAS,
    DECIDING,
    LARGEST,
    RECORDED,
    decided_otherwise,
    done_otherwise,
    parity,
    recorded,
    twin_otherwise,
    unreached,
)
from parity.record import main

each = pytest.mark.parametrize("name", DECIDING)


@each
def test_a_recorded_log_lies_here_and_is_small(name: str) -> None:
    assert 0 < (RECORDED / f"{name}.jsonl.xz").stat().st_size <= LARGEST


@each
def test_the_policy_decides_as_recorded(name: str, tmp_path: Path) -> None:
    assert decided_otherwise(name, recorded(name, tmp_path)) == []


@each
def test_live_did_what_it_had_decided(name: str, tmp_path: Path) -> None:
    assert done_otherwise(name, recorded(name, tmp_path)) == []


@each
def test_the_twin_decides_as_live_did(name: str, tmp_path: Path) -> None:
    assert twin_otherwise(name, recorded(name, tmp_path)) == []


@each
def test_the_recorded_log_reaches_every_rule(name: str, tmp_path: Path) -> None:
    assert unreached(name, recorded(name, tmp_path)) == []


@pytest.mark.parametrize("area", AREAS)
def test_each_mutant_changes_a_rule_that_stands(area: str) -> None:
    table = mutants(area)
    assert table
    for mutant in table:
        assert mutated(mutant, ROOT / "src" / "windtunnel")


@pytest.mark.conformance
@each
def test_a_fresh_run_does_what_it_decides(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if parity(name).root and os.geteuid() != 0:
        pytest.skip(f"recording {name} needs root")
    status = main(["--check", name])
    assert status == 0, capsys.readouterr().out
