"""Sweeps as they run: failures, resuming, showing. Emulation itself is stood in for; in the tests of
conformance a sweep runs a real script."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner

from windtunnel.base.errors import ScriptError
from windtunnel.cli.sweep import sweep as verb
from windtunnel.training.emulate.sweep import execute as group_module
from windtunnel.training.emulate.sweep import load_sweep, result, run_sweep

GIB = 2**30


class Emulator:
    """Stands in for capture and emulation: figures are made up from the arguments, calls are counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing: set[int]) -> None:
        self.failing = failing
        self.captured: list[tuple[str, ...]] = []
        self.emulated: list[str] = []
        monkeypatch.setattr(group_module, "capture", self.capture)
        monkeypatch.setattr(group_module, "emulate", self.emulate)

    def capture(self, script: Any, cluster: Any, options: Any, progress: Any, log: Any) -> str:
        self.captured.append(script.arguments)
        if int(script.arguments[1]) in self.failing:
            raise ScriptError("the script failed as rank 0 (exit status 1)", "Traceback\nValueError: odd\n")
        return "classes"

    def emulate(self, script: Any, _: Any, cluster: Any, options: Any, *, take: Any, **__: Any) -> Any:
        assert take(script, cluster, options, None, None) == "classes"
        self.emulated.append(cluster.name)
        tp = int(script.arguments[1])
        seconds = 1 / tp + (0.5 if "ib-100" in cluster.name else 0)
        most = 90 if tp == 8 else 10 * tp
        ranks = [
            SimpleNamespace(memory_bytes=80 * GIB, headroom_bytes=(80 - size) * GIB) for size in (1, most)
        ]
        price, world = cluster.price_per_device_hour, cluster.world_size
        summary = SimpleNamespace(
            run_id=f"run-{tp}", directory="/nowhere", iteration_time_s=seconds, world_size=world,
            tokens_per_iteration=4000, tokens_per_second_per_device=1.0, mfu=0.5, ranks=ranks,
            cost_per_iteration=None if price is None else price * world * seconds / 3600, wall_time_s=1.0,
            peak_reserved_bytes=most * GIB, fits=most < 80,
        )  # fmt: skip
        return SimpleNamespace(summary=summary)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path / "home"))
    (tmp_path / "train.py").write_text("")
    return tmp_path


def spec(folder: Path, more: str = "") -> Path:
    path = folder / "sweep.yaml"
    path.write_text(
        "script: train.py\ngrid: {--tp: [1, 2, 4, 8]}\n"
        "clusters: ['h100-sxm:2x4,nic={ib-100,ib-400}']\n" + more
    )
    return path


def test_only_what_is_not_done_is_done_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulator = Emulator(monkeypatch, {2})
    sweep = load_sweep(spec(folder))
    place, rows = run_sweep(sweep)
    failed = [row for row in rows if row["status"] == "failed"]
    assert [row["chosen"] for row in failed] == [{"--tp": 2}] * 2
    assert failed[0]["error"] == "the script failed as rank 0 (exit status 1): ValueError: odd"
    assert emulator.captured.count(("--tp", "2")) == 1

    (place / "points" / "00006.json").unlink()  # as if it had been killed before this one
    again = Emulator(monkeypatch, set())
    _, resumed = run_sweep(sweep)
    assert again.captured == [("--tp", "2"), ("--tp", "4")]
    assert [row["status"] for row in resumed] == ["done"] * 8
    assert resumed[6] == rows[6]

    fresh = Emulator(monkeypatch, set())
    run_sweep(sweep, resume=False)
    assert len(fresh.captured) == 4


def test_the_front_has_only_points_that_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Emulator(monkeypatch, {1})
    swept = result(run_sweep(load_sweep(spec(folder, "price_per_device_hour: 2\n")))[1])
    # 7 is the fastest, and does not fit
    assert [row["point"] for row in swept.rows if row["pareto"]] == [5, 6]
    assert swept.cost(swept.rows[6]) == pytest.approx(2 * 8 * 0.25 / 3600 / 4000 * 1e6)
    assert swept.plain()["objectives"][0] == "seconds for a million tokens"
    assert swept.time(swept.rows[6]) == pytest.approx(0.25 / 4000 * 1e6)


def test_the_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Emulator(monkeypatch, {2})
    shown = command(str(spec(folder, "name: '[x]'\n"))).stdout
    assert "Sweep [x]" in shown
    assert "c2 h100-sxm:2x4,nic=ib-400" in shown
    assert "dev-h/Mtok" in shown
    assert "✗ 1, 5 the script failed" in shown
    assert shown.count("★") == 2 + 1


def command(*arguments: str) -> Any:
    app = Typer()
    app.callback()(lambda: None)
    app.command("sweep")(verb)
    return CliRunner().invoke(app, ["sweep", *arguments])


def test_the_command_prints_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Emulator(monkeypatch, set())
    printed = json.loads(command(str(spec(folder, "where: tp < 8\n")), "--json").stdout)
    assert len(printed["rows"]) == 6
    assert printed["left_out"] == 2
    assert printed["provenance"]["other figures"] == "emulated"
    assert "★" in command(str(spec(folder, "where: tp < 8\n"))).stdout


def test_a_sweep_of_failures_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Emulator(monkeypatch, {1, 2, 4, 8})
    ended = command(str(spec(folder)))
    assert isinstance(ended.exception, ScriptError)
    assert "all 8 points failed" in str(ended.exception)
    assert "✗ 0-7" in ended.stdout
