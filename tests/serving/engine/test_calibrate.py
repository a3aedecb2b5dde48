"""Steps are measured on a grid; the step model that fits them is kept, and read for emulations."""

from __future__ import annotations

from dataclasses import astuple, replace
from pathlib import Path

import pytest

from windtunnel.calibration import profiles
from windtunnel.serving.engine import calibrate, profile
from windtunnel.serving.engine.model import StepTime


def test_the_fit_finds_the_model_that_made_the_points() -> None:
    fused = StepTime(base=0.01, row=1e-4, kv=2e-7, token=3e-4, pair=1e-7)
    apart = replace(fused, base=0.002, decode=0.008, chunk=0.009)
    steps = [
        (n, n * k, ((p, p + k),) * (1 + k // 400) if p else ())
        for n in (0, 1, 8, 64)
        for k in (16, 512)
        for p in (0, 32, 512)
        if n + p
    ]
    for true in (fused, apart):
        seconds = [true.of(*step) for step in steps]
        fitted, error = profile.fit(steps, seconds, fused=true is fused)
        assert error < 1e-6 and astuple(fitted) == pytest.approx(astuple(true), abs=1e-9)
        crooked = [each * (1.2 if step[0] == 8 else 1) for step, each in zip(steps, seconds, strict=True)]
        assert profile.fit(steps, crooked)[1] > 0.01


def test_a_profile_is_measured_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    monkeypatch.setattr(calibrate, "MODEL", "tiny-hybrid")
    monkeypatch.setattr(calibrate, "QUICK", ((2, 5, 0), (1, 9, 3)))
    monkeypatch.setattr(calibrate, "CHUNK", 8)
    reports: list[tuple[str, float]] = []
    profile_file = calibrate.calibrate_here(
        quick=True, progress=lambda part, share: reports.append((part, share))
    )
    assert profile_file.path == profiles.own(profile.NAME) and reports[0] == ("model", 0.0)
    assert reports[-1][0] == "steps" and 0.6 < reports[-1][1] < 1
    points = profiles.read(profile_file.path, "a profile", profile.VERSION, lambda content: content["points"])
    # two prompts of five, at most eight tokens in a step; then one of nine, which three branches share
    assert [point[:3] for point in points] == [
        [0, 0, [[5, 5], [3, 3]]], [1, 5, [[2, 5]]], [2, 11, []], [2, 13, []], [1, 7, []],
        [0, 0, [[8, 8]]], [0, 0, [[1, 9]] * 3], [3, 11, []], [3, 14, []], [3, 17, []],
    ]  # fmt: skip
    assert all(point[3] > 0 for point in points)
    known = profile.step_time("calibrated")
    assert known.time.of(2, 11, [(3, 3)]) > 0 and known.token_bytes > 0 and "tiny-hybrid" in known.about
