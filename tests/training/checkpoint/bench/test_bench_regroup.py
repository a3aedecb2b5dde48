"""The comparison of regroupings: its figures from recoveries that are given."""

from __future__ import annotations

import pytest

from benchmarks.training.checkpoint import regroup
from windtunnel.training.elastic.events import Recovery


def recovered(evidence: str, detected: float, grouped: float) -> Recovery:
    return Recovery(
        kind="loss",
        generation=2,
        generations=1,
        cause="",
        lost=({"evidence": evidence},),
        fault="kill_worker(1)",
        injected=100.0,
        detected=100.0 + detected,
        decided=100.0 + detected + 0.02,
        grouped=100.0 + grouped,
        loaded=None,
        first_step=100.0 + grouped + 0.01,
        newest=3,
        resumed=3,
        steps_lost=0,
        complete=True,
    )


def test_kills_count_from_the_signal_and_stops_from_their_detection() -> None:
    found = [recovered("exit", 0.03, 0.1), recovered("exit", 0.03, 0.12), recovered("exit", 0.03, 0.3)]
    found.append(recovered("frozen", 1.02, 1.1))
    killed, slowest, stopped = regroup.rows(4, found, True)
    assert killed.measured == pytest.approx(0.12)
    assert killed.met is True
    assert "detect 30 ms, decide 20 ms" in killed.note
    assert slowest.measured == pytest.approx(0.3)
    assert stopped.measured == pytest.approx(0.08)
    assert "detected after 1.02 s" in stopped.note


def test_survivors_that_were_started_anew_miss_the_target() -> None:
    killed, *_ = regroup.rows(4, [recovered("exit", 0.03, 0.1)], False)
    assert killed.met is False
