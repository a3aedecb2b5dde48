"""Ratios are to the baselines in the same run: one variant an architecture, on hosts of its own
(``individual``, ``static``) or on shared ones. Published figures are INFaaS's (ATC 2021), of its own
baselines and load."""

from benchmarks.harness.rows import runner

SECTIONS = {"live": "live.live_rows", "cost": "twin.cost_rows", "fixed": "twin.fixed_rows"}
run = runner(__name__, SECTIONS, traced=("cost", "fixed"))
