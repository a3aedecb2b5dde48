"""SIRA-H beside TCP's congestion controls, a forecast and an oracle, on links as the paper's and on others.

The paper prints, for its recorded links of 6.92 Mb/s in the mean, rates and the queue's delay (IWQoS 2016);
our near-stationary link is drawn after its description, with a queue of 500 packets, which it does not state.
"""

from benchmarks.harness.rows import runner

SECTIONS = {
    "near-stationary": "twin.near_stationary_rows",
    "driving": "twin.driving_rows",
    "lossy": "twin.lossy_rows",
    "live": "live.live_rows",
}
run = runner(__name__, SECTIONS)
