"""Job completion times of the same jobs under every schedule, side by side. The paper (MXDAG, HotNets 2021)
has worked examples and no measurement."""

from benchmarks.harness.rows import runner

SECTIONS = {
    "example": "twin.example_rows", "jct": "twin.jct_rows", "sizes": "twin.size_rows",
    "live": "live.live_rows",
}  # fmt: skip
run = runner(__name__, SECTIONS)
