"""What recording costs beside no recording and beside OpenTelemetry, and whether replays read the same."""

from benchmarks.harness.rows import runner

SECTIONS = {"overhead": "rows.overhead_rows", "replay": "rows.replay_rows"}
run = runner(__name__, SECTIONS)
