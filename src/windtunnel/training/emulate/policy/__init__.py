"""Which ranks of a job to capture, and what all the others do: slices, classes, and the stitched world."""

from windtunnel.training.emulate.policy.checks import (
    Capture,
    Check,
    CheckedCells,
    Condition,
    Decision,
    Observation,
    RankSource,
)
from windtunnel.training.emulate.policy.search import POLICIES, decide

__all__ = [
    "POLICIES",
    "Capture",
    "Check",
    "CheckedCells",
    "Condition",
    "Decision",
    "Observation",
    "RankSource",
    "decide",
]
