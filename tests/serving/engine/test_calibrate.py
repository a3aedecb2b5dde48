"""Steps are measured on a grid; the step model that fits them is kept, and read for emulations."""

from __future__ import annotations

from pathlib import Path

import pytest

from windtunnel.calibration import profiles
from windtunnel.serving.engine import calibrate, profile
from windtunnel.serving.engine.live import timing
from windtunnel.serving.engine.model import StepTime


def test_the_fit_finds_the_model_that_made_the_points() -> None:
    true = StepTime(base=0.01, row=1e-4, kv=2e-7, token=3e-4, pair=1e-7)
    steps = [(n, n * k, p, p + k) for n in (1, 8, 64) for k in (16, 512) for p in (0, 32, 512)]
    found, error = timing.fit([(one, true.of(*one)) for one in steps])
    assert error < 1e-6 and found.base == pytest.approx(true.base) and found.kv == pytest.approx(true.kv)
    assert timing.fit([(one, true.of(*one) * (1 + 0.2 * (one[0] == 8))) for one in steps])[1] > 0.01


def test_a_profile_is_measured_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    monkeypatch.setattr(calibrate, "MODEL", "tiny-hybrid")
    grid = {"rows": (1, 3), "contexts": (4, 24), "chunks": (2, 8), "apart": 80}
    monkeypatch.setattr(calibrate, "QUICK", grid)
    told: list[tuple[str, float]] = []
    made = calibrate.calibrate_here(quick=True, progress=lambda part, share: told.append((part, share)))
    assert made.path == profiles.own(profile.NAME) and told[-1] == ("steps", 0.75)
    points = profiles.read(made.path, "a profile", profile.VERSION, lambda content: content["points"])
    # shared prefixes, prefills alone, then rows with prefixes of their own, beside which one prefills
    assert [tuple(one[:4]) for one in points[:6]] == [
        (1, 5, 0, 0), (0, 0, 2, 6), (0, 0, 8, 12), (3, 7, 0, 0), (3, 12, 0, 0), (3, 12, 8, 12),
    ]  # fmt: skip
    known = profile.step_time("calibrated")
    assert known.time.base > 0 and known.token_bytes > 0 and "tiny-hybrid" in known.about
