"""Jobs in the twin: the worked example, tasks in their order, capacities kept."""

from __future__ import annotations

import pytest

from benchmarks.network.dag import EXAMPLE, EXAMPLE_RESOURCES
from windtunnel.network.dag.policy import SCHEDULES
from windtunnel.network.dag.twin import emulate


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_worked_example_takes_seven_seconds_instead_of_eight(schedule: str) -> None:
    done = emulate([EXAMPLE], EXAMPLE_RESOURCES, schedule)
    assert done.mean == pytest.approx(7.0 if schedule == "mxdag" else 8.0)
