"""The comparison of idle spans: its plan, and its figures from steps that are given."""

from __future__ import annotations

import pytest

from benchmarks.training.checkpoint import idle
from windtunnel.linux import network


@pytest.mark.parametrize("quick", [True, False])
def test_every_job_has_steps_without_checkpoints_and_images_that_grow(quick: bool) -> None:
    for phases in idle.plan(quick):
        assert any(phase.mode == "none" for phase in phases)
        sizes = [p.plain(n)["nbytes"] for n, p in enumerate(phases) if p.mode != "none"]
        assert sizes == sorted(set(sizes))


def test_the_headline_has_sixty_steps_and_the_sizes_are_of_the_idle_time() -> None:
    phases = [phase for phases in idle.plan(quick=False) for phase in phases]
    headline = idle.Phase("idle", 0.5, 60)
    assert headline in phases
    assert headline.nbytes == pytest.approx(0.5 * idle.IDLE * idle.RATE, abs=4096)
    for mode in ("idle", "concurrent", "blocking"):
        assert {0.25, 0.5, 1, 2} <= {phase.ratio for phase in phases if phase.mode == mode}


def test_figures_are_over_the_steps_without_checkpoints() -> None:
    alone = [0.50, 0.50, 0.52]
    outcome = idle.IdleResult([0.51, 0.51, 0.55], every=1, inside=0.75)
    median, high, inside = idle.rows(idle.Phase("idle", 0.5, 3), outcome, alone)
    assert median.measured == pytest.approx(2.0)
    assert median.met is True
    assert high.measured == pytest.approx(100 * (0.55 / 0.52 - 1))
    assert inside.measured == 75.0
    missed, _ = idle.rows(idle.Phase("idle", 0.5, 1), idle.IdleResult([0.6], 1, None), alone)
    assert missed.met is False
    free, _ = idle.rows(idle.Phase("concurrent", 0.5, 1), idle.IdleResult([0.6], 1, None), alone)
    assert free.met is None


def test_a_host_without_network_namespaces_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "missing", lambda: "network namespaces need root")
    (row,) = idle.idle_rows(quick=True)
    assert row.measured is None
    assert "root" in row.note
