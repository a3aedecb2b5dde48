"""What aggregation is judged by: ``python -m benchmarks network.aggregation``.

ESA's abstract has one figure, "up to 1.35x" in average job completion time over "existing" systems; all else
is between arms of this run. The twin's arms have the same repair and way of results; live, a switch in its
own network namespace is held against gloo's ring on the same links.
"""

from __future__ import annotations

from benchmarks.harness.rows import runner

SECTIONS = {"twin": "twin.twin_rows", "live": "live.live_rows"}

run = runner(__name__, SECTIONS)
