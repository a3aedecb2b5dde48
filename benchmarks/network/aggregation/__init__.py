"""ESA's abstract has one figure, "up to 1.35x" in average job completion time; all else is between arms of
this run. Live, a switch in its own network namespace is held against gloo's ring on the same links.
"""

from benchmarks.harness.rows import runner

SECTIONS = {"twin": "twin.twin_rows", "live": "live.live_rows"}
run = runner(__name__, SECTIONS)
