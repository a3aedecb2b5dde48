"""What planning computing and sending together gives: ``python -m benchmarks network.dag``.

Job completion times of the same jobs under every schedule, side by side. The paper (MXDAG, HotNets 2021) is a
position paper with worked examples and no measurement.
"""

from __future__ import annotations

from benchmarks.harness.rows import runner

SECTIONS = {
    "example": "twin.example_rows",
    "jct": "twin.jct_rows",
    "sizes": "twin.size_rows",
    "live": "live.live_rows",
}

run = runner(__name__, SECTIONS)
