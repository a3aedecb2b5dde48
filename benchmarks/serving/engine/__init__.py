"""Speed of the twin on a million requests; and the twin held against the live engine, which serve the same
requests, the twin by a step model that is measured meanwhile."""

from benchmarks.harness.rows import runner

SECTIONS = {"speed": "rows.speed_rows", "live": "rows.live_rows"}
run = runner(__name__, SECTIONS, traced=("speed",))
