"""Costs with round figures, so that what the twin must say can be worked out by hand."""

from __future__ import annotations

from dataclasses import fields

from windtunnel.agents.sandbox.costs import SandboxCosts


def plain_costs(**given: float) -> SandboxCosts:
    """All zero but for what is given, and one lane."""
    zero = dict.fromkeys((one.name for one in fields(SandboxCosts)), 0.0) | {"disk_lanes": 1.0}
    return SandboxCosts(**(zero | given))
