"""A matrix of foreign programs: which of them come back as they were, by their own verdict.

``windtunnel bench agents.sandbox --only matrix`` runs it; ``make matrix-sandbox`` also installs what it needs
and writes the table into docs/sandbox.md.
"""
