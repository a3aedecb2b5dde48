"""What a multicast over splitters is judged by: ``python -m benchmarks network.multicast``.

There is no public ratio of Shufflecast's: the formula is held against the twin, and every arm against the
others of the same run. The electrical arms have ports of the same rate, one in each direction a rack; a rack
of the fabric has one to send and p to receive.
"""

from __future__ import annotations

from benchmarks.harness.rows import runner

SECTIONS = {"twin": "twin.twin_rows", "live": "live.live_rows"}

run = runner(__name__, SECTIONS)
