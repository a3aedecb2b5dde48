"""When the state of a run is to be looked at."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from windtunnel.training.elastic.policy.core import Core
from windtunnel.training.elastic.policy.handlers import closed, hello
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
