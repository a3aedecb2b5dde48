"""The comparison that pipeline templates are judged by: ``windtunnel bench training.pipelines``.

Live sections run the same job in the same harness under every way to go on. Published figures are Oobleck's
(Jang et al., SOSP 2023) and its artifact's; what is emulated says so.
"""

from __future__ import annotations

from windtunnel.bench.rows import runner

SECTIONS = {
    "planner": "planner.planner_rows",
    "recovery": "recovery.recovery_rows",
    "rates": "recovery.rates_rows",
    "published": "replay.published_rows",
    "twin": "twin.twin_rows",
    "fidelity": "fidelity.fidelity_rows",
}

run = runner(__name__, SECTIONS)
