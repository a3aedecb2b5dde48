"""Sweeps of a real script: killed and resumed, in processes, on Ray, and replayed on another network."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.waiting import until
from training.emulate.capturing import SCRIPTS
from windtunnel.cluster.load import load_cluster
from windtunnel.training.emulate.emulation import simulate
from windtunnel.training.emulate.options import Options
from windtunnel.training.emulate.program import Script
from windtunnel.training.emulate.run import no_fabrics
from windtunnel.training.emulate.sweep import load_sweep, run_sweep
from windtunnel.training.emulate.sweep.execute import emulate_on_ray

SCRIPT = SCRIPTS / "sweep_me.py"
VARYING = ("run_id", "directory", "wall_time_s")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path / "home"))


def spec(folder: Path, widths: str, clusters: str = "h100-sxm:1x4", note: str = "") -> Path:
    path = folder / "sweep.yaml"
    path.write_text(
        f"script: {SCRIPT}\nargs: '{note}'\ngrid: {{--width: [{widths}]}}\nclusters: ['{clusters}']\n"
        "options: {ranks: 0, tokens: 64}\n"
    )
    return path


def emulated(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in VARYING} for row in rows]


@pytest.mark.slow
def test_another_network_on_the_same_capture_is_as_a_capture_of_its_own(tmp_path: Path) -> None:
    note = tmp_path / "starts"
    _, rows = run_sweep(
        load_sweep(spec(tmp_path, "256,3", "h100-sxm:2x2,nic={ib-400,ethernet-10}", f"--note {note}")),
        pictures=False,
    )
    assert note.read_text().split() == ["256", "3"]  # the script ran once for both networks
    slow = load_cluster("h100-sxm:2x2,nic=ethernet-10")
    alone = simulate(Script(SCRIPT, ("--width", "256")), slow, Options(ranks="0", tokens=64))
    by_network = {row["cluster"]: row for row in rows if row["chosen"] == {"--width": 256}}
    replayed = by_network["h100-sxm:2x2,nic=ethernet-10"]
    assert replayed["iteration_time_s"] == alone.timing.iteration_time_s
    assert replayed["peak_reserved_bytes"] == max(rank.steady.reserved_bytes for rank in alone.memory)
    assert replayed["iteration_time_s"] > by_network["h100-sxm:2x2,nic=ib-400"]["iteration_time_s"]
    odd = [row for row in rows if row["chosen"] == {"--width": 3}]
    assert [row["status"] for row in odd] == ["failed"] * 2
    assert "--width 3 is odd" in odd[0]["error"]


@pytest.mark.slow
def test_killed_and_resumed_it_gives_the_same_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = tmp_path / "starts"
    sweep = load_sweep(spec(tmp_path, "64,4096", note=f"--note {note}"))
    program = (
        "import sys; from pathlib import Path; from windtunnel.training.emulate.sweep import *; "
        "run_sweep(load_sweep(Path(sys.argv[1])), pictures=False)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "sweep.yaml")], start_new_session=True
    )
    points = tmp_path / "home" / "sweeps" / sweep.id / "points"
    until(lambda: (points / "00000.json").exists() or process.poll() is not None)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    kept = {path.name: path.read_text() for path in points.glob("*.json")}
    assert "00000.json" in kept
    assert "00001.json" not in kept

    _, resumed = run_sweep(sweep, pictures=False)
    assert {name: (points / name).read_text() for name in kept} == kept
    assert note.read_text().split().count("64") == 1

    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path / "other"))
    _, uninterrupted = run_sweep(sweep, jobs=2, pictures=False)  # in processes, too, for that matter
    assert emulated(resumed) == emulated(uninterrupted)
    assert len({row["iteration_time_s"] for row in resumed}) == 2


@pytest.mark.slow
def test_on_ray_as_here(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs ray (extra ray)")
    sweep = load_sweep(spec(tmp_path, "64,3"))
    _, remote = run_sweep(sweep, elsewhere=partial(emulate_on_ray, "ray", False, no_fabrics))
    _, here = run_sweep(sweep, resume=False, pictures=False)
    assert emulated(remote) == emulated(here)
    assert [row["status"] for row in here] == ["done", "failed"]
