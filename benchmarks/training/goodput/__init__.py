"""What the twin of jobs that fail is judged by: ``python -m benchmarks training.goodput``.

The published comparison by its own rules and by the twin's, the twin at scale, and the twin against the real
runs of the bench of pipelines. What is emulated says so.
"""

from __future__ import annotations

from benchmarks.harness.rows import runner

SECTIONS = {
    "published": "published.published_rows",
    "twin": "month.twin_rows",
    "fidelity": "fidelity.fidelity_rows",
}

run = runner(__name__, SECTIONS)
