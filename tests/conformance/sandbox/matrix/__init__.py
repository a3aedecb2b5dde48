"""A matrix of foreign programs: which of them come back as they were, by their own verdict.

``make matrix-sandbox`` installs what it needs, runs it and writes docs/benchmarks/sandbox-programs.md.
"""
