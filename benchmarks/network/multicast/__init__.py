"""There is no public ratio of Shufflecast's: the formula is held against the twin, and every arm against the
others of the same run. Electrical arms have a port in each direction a rack; a rack of the fabric p to
receive."""

from benchmarks.harness.rows import runner

SECTIONS = {"twin": "twin.twin_rows", "live": "live.live_rows"}
run = runner(__name__, SECTIONS)
