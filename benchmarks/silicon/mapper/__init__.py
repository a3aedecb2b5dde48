"""Counts and optima against brute force, energy against what is published, time against ZigZag. Energies are
emulated; what is measured is time."""

from benchmarks.harness.rows import runner

SECTIONS = {
    "counts": "chips.count_rows", "optimum": "chips.optimum_rows", "allocation": "chips.allocation_rows",
    "search": "chips.search_rows",
}  # fmt: skip
run = runner(__name__, SECTIONS)
