"""What the tests of the twin share: costs with round figures, so that answers can be worked out by hand."""

from __future__ import annotations

from dataclasses import fields

import pytest

from windtunnel.agents.sandbox.costs import SandboxCosts


def plain_costs(**given: float) -> SandboxCosts:
    """All zero but for what is given, and one lane."""
    zero = dict.fromkeys((field.name for field in fields(SandboxCosts)), 0.0) | {"disk_lanes": 1.0}
    return SandboxCosts(**(zero | given))


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
