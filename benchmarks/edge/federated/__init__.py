"""Bytes over a server's link, accuracy for the same bytes, and the time of real rounds with Flower."""

from benchmarks.harness.rows import runner

SECTIONS = {"bytes": "learning.byte_rows", "accuracy": "learning.accuracy_rows", "live": "live.live_rows"}
run = runner(__name__, SECTIONS)
