"""Faults that depend on the number of the rank are found without running every rank; look-alikes pass."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from by_rank import FAULTS, HEALTHY, HOST, WORLD, ByRank

from windtunnel.base.errors import ScriptError
from windtunnel.training.emulate.run import Run, emulate

CLUSTER = f"h100-sxm:{WORLD // HOST}x{HOST}"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("BAD_RANK", "2")


def run(program: ByRank, folder: Path) -> Run:
    (folder / "skip-12").touch()
    script = folder / "train.py"
    script.write_text(program.text)
    return emulate(script, cluster=CLUSTER, pictures=False)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda one: one.name)
def test_a_fault_of_some_ranks_is_found(fault: ByRank, tmp_path: Path) -> None:
    with pytest.raises(ScriptError) as caught:
        run(fault, tmp_path)
    said = str(caught.value)
    assert re.search(fault.said, said), said
    assert "train.py:" in said


@pytest.mark.parametrize("program", HEALTHY, ids=lambda one: one.name)
def test_ranks_that_differ_without_harm_pass(program: ByRank, tmp_path: Path) -> None:
    summary = run(program, tmp_path).summary
    assert sorted((*summary.captured_ranks, *summary.checked_ranks, *summary.assumed_ranks)) == list(
        range(WORLD)
    )
    assert summary.iteration_time_s > 0


def test_another_program_at_the_same_path_is_read_anew(tmp_path: Path) -> None:
    said = []
    for fault in FAULTS[:2]:
        with pytest.raises(ScriptError) as caught:
            run(fault, tmp_path)
        said.append(bool(re.search(fault.said, str(caught.value))))
    assert said == [True, True]
