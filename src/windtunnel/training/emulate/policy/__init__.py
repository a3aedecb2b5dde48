"""Which ranks of a job to capture, and what all the others do: slices, classes, and the stitched world."""

from windtunnel.training.emulate.policy.search import (
    POLICIES,
    Capture,
    Decision,
    Known,
    Observation,
    decide,
)

__all__ = ["POLICIES", "Capture", "Decision", "Known", "Observation", "decide"]
