"""What the tests of the twin share."""

from __future__ import annotations

import pytest

from agents.sandbox.twin.plain_costs import plain_costs
from windtunnel.agents.sandbox.costs import SandboxCosts


@pytest.fixture
def costs() -> SandboxCosts:
    return plain_costs(
        shell=0.25,
        files_freeze=0.5,
        files_after=0.5,
        full_freeze=1.0,
        full_after=1.0,
        restore=2.0,
        create=4.0,
    )
