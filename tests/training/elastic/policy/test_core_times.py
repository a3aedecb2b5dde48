"""When the state of a run is to be looked at."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from windtunnel.training.elastic.policy.core import Core
from windtunnel.training.elastic.policy.handlers import closed, hello, message
from windtunnel.training.elastic.policy.rules import Rules
from windtunnel.training.elastic.policy.state import LoggedState, SupervisorSettings


def test_a_host_that_is_away_is_given_up_as_soon_as_it_has_to_be_back() -> None:
    core = Core(SupervisorSettings(1, 1), Rules(), Mock(), 1, LoggedState(), 0.0)
    hello(core, 0, {"address": "", "memory": "", "pid": 1}, 0.0)
    core.tick(0.1)
    assert core.generation == 1 and core.due(0.1) == pytest.approx(core.settings.beat / 2)
    closed(core, 0, 0.2)
    back = 0.2 + core.settings.deadlines.grace
    assert core.due(back - 0.01) == pytest.approx(0.01)
    core.tick(back - 0.01)
    assert core.places() == (0,)
    core.tick(back + 1e-6)
    assert core.places() == (None,) and core.due(back) == pytest.approx(core.settings.settle, abs=1e-5)


def test_a_job_that_stands_still_for_a_host_goes_on_as_soon_as_it_comes() -> None:
    core = Core(SupervisorSettings(1, 1), Rules(), Mock(), 1, LoggedState(), 0.0)
    hello(core, 0, {"address": "", "memory": "", "pid": 1}, 0.0)
    core.tick(0.1)
    closed(core, 0, 0.2)
    lost = 0.2 + core.settings.deadlines.grace + 1e-6
    core.tick(lost)
    core.tick(lost + core.settings.settle)
    assert core.places() == (None,) and core.coming == 1
    hello(core, 1, {"address": "", "memory": "", "pid": 2}, 1.0)
    core.tick(1.0)
    assert core.places() == (1,)


def test_who_has_no_process_yet_is_not_waited_for_in_vain() -> None:
    """Its fork server is started anew, for longer than the others wait for it in their group."""
    effects = Mock()
    core = Core(SupervisorSettings(2, 1), Rules(), effects, 1, LoggedState(), 0.0)
    for link in (0, 1):
        hello(core, link, {"address": "", "memory": "", "pid": link}, 0.0)
    core.tick(0.1)
    message(core, 0, {"op": "worker", "what": "started", "rank": 0, "generation": 1, "pid": 7}, 0.2)
    message(core, 0, {"op": "suspect", "rank": 0, "generation": 1, "error": "nobody said here/1"}, 10.0)
    for now in (10.4, 10.8, 11.2, 60.0, 90.0):
        for link in (0, 1):
            message(core, link, {"op": "beat"}, now)
        core.tick(now)
    assert core.generation == 1 and core.outcome is None and core.round is None
    message(core, 1, {"op": "worker", "what": "started", "rank": 1, "generation": 1, "pid": 8}, 90.1)
    core.tick(90.2)
    for link in (0, 1):
        message(core, link, {"op": "reached", "round": 1, "silent": []}, 90.3)
    core.tick(90.4)
    core.tick(90.4 + core.settings.settle)
    assert core.generation == 2 and core.suspicions == 1
