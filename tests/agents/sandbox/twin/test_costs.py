"""Costs: formulas by hand, profiles that are kept whole, and fits that find what was put in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agents.sandbox.twin.conftest import plain_costs
from windtunnel.agents.sandbox.calibrate import calibrate_here, fitted
from windtunnel.agents.sandbox.costs import (
    NAME,
    SHIPPED,
    SandboxProfile,
    load_costs,
    save_costs,
)
from windtunnel.agents.sandbox.model import TurnClass
from windtunnel.base.errors import UserError
from windtunnel.calibration import profiles


def test_a_full_checkpoint_by_hand() -> None:
    costs = plain_costs(
        full_freeze=1,
        full_freeze_per_byte=2,
        full_freeze_per_process=3,
        full_after=5,
        full_after_per_byte=7,
        full_after_per_new_byte=11,
        new_base=13,
        new_per_byte=0.5,
        files_new=17,
    )
    work = costs.checkpoint(TurnClass.FULL, memory=10, processes=2, dirty=4, files=19)
    assert (work.freeze, work.after, work.written) == (1 + 20 + 6, 5 + 70 + 44, 17 + 19 + 13 + 2)
    # no more is new than there is
    all_new = costs.checkpoint(TurnClass.FULL, memory=10, processes=2, dirty=99)
    assert (all_new.seconds, all_new.written) == (1 + 20 + 6 + 5 + 70 + 110, 17 + 13 + 5)


def test_a_profile_comes_back_as_it_was_written(tmp_path: Path) -> None:
    profile = SandboxProfile(plain_costs(decide=0.25), {"machine": "m", "date": "d"})
    path = tmp_path / "deep" / "profile.json"
    save_costs(profile, path)
    again = load_costs(path)
    assert (again.costs, again.provenance) == (profile.costs, profile.provenance)
    assert again.origin == "own profile, measured on m, d"
    assert [file.name for file in path.parent.iterdir()] == ["profile.json"]


def test_the_users_own_profile_goes_before_the_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    assert load_costs().path == str(SHIPPED)
    save_costs(SandboxProfile(plain_costs(decide=3)), profiles.own(NAME))
    assert load_costs().costs.decide == 3


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"version": 99}, "version"),
        ({"costs": {}}, "not a profile"),
        ({"provenance": None}, "not a profile"),
    ],
)
def test_what_is_no_profile_is_refused(tmp_path: Path, change: dict[str, object], word: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(json.loads(SHIPPED.read_text()) | change))
    with pytest.raises(UserError, match=word):
        load_costs(path)


def test_a_figure_that_cannot_be_is_refused(tmp_path: Path) -> None:
    data = json.loads(SHIPPED.read_text())
    data["costs"]["full_cpu"] = 1.5
    (tmp_path / "profile.json").write_text(json.dumps(data))
    with pytest.raises(UserError, match=r"full_cpu is 1\.5"):
        load_costs(tmp_path / "profile.json")


def test_costs_come_out_of_measurements_that_they_would_give() -> None:
    basics = {
        **{f"{name}_share": [0.5] for name in ("shell", "files", "full", "restore")},
        **{name: [1.0] for name in ("decide", "shell", "files_freeze", "files_after", "files_new", "create")},
        "at_once": [0.2],
    }
    sizes = {
        (memory, processes): {
            "raw": [4e6 + memory + 1e5 * processes],
            "new_first": [0.4 * memory],
            "new_next": [50.0],
            "freeze": [0.05 + 1e-9 * memory + 0.003 * processes],
            "after_first": [0.01 + 3e-9 * memory],
            "after": [0.01 + 1e-9 * memory],
            "restore": [0.06 + 2e-9 * memory + 0.001 * processes],
        }
        for memory in (0, 10_000_000, 40_000_000)
        for processes in (1, 4)
    }
    costs, errors = fitted(basics, sizes)
    assert costs.full_freeze == pytest.approx(0.05)
    assert costs.full_freeze_per_byte == pytest.approx(1e-9)
    assert costs.full_freeze_per_process == pytest.approx(0.003)
    assert costs.full_after_per_new_byte == pytest.approx(2e-9)
    assert costs.restore_per_byte == pytest.approx(2e-9)
    assert costs.new_per_byte == pytest.approx(0.4)
    assert costs.image_base == pytest.approx(4e6)
    assert "freeze 0%" in errors


def test_calibration_needs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(UserError, match="needs root"):
        calibrate_here(True, lambda *_: None)


@pytest.mark.conformance
@pytest.mark.root
def test_this_machine_can_be_measured_and_nothing_stays(tmp_path: Path, new_home: Path) -> None:
    new_home.rmdir()
    measured = calibrate_here(True, lambda *_: None, path=tmp_path / "profile.json", home=new_home)
    assert not new_home.exists()
    new_home.mkdir()
    assert measured.path == tmp_path / "profile.json"
    profile = load_costs(measured.path)
    assert profile.provenance["errors"] in measured.said
    costs = profile.costs
    assert min(costs.shell, costs.files_freeze, costs.files_after) > 0
    assert costs.checkpoint(TurnClass.FULL, processes=1).seconds > costs.files_freeze + costs.files_after
    assert costs.image_base > 0
    assert 0.1 < costs.new_per_byte < 1
    assert str(new_home) not in Path("/proc/self/mounts").read_text()
