"""The comparison that pipeline templates are judged by: ``python -m benchmarks training.pipelines``.

Live sections run the same job in the same harness under every way to go on. Published figures are Oobleck's
(Jang et al., SOSP 2023).
"""

from __future__ import annotations

from benchmarks.harness.rows import runner

SECTIONS = {
    "planner": "planner.planner_rows",
    "recovery": "recovery.recovery_rows",
    "rates": "recovery.rates_rows",
}

run = runner(__name__, SECTIONS)
