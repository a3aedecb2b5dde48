"""The paper's simulator on its own data, what it measured, and predicted against measured over gloo."""

from benchmarks.harness.rows import runner

SECTIONS = {"netai20": "rules.table_rows", "measured": "rules.measured_rows", "live": "live.live_rows"}
run = runner(__name__, SECTIONS)
