"""What the twin of jobs that fail is judged by: ``python -m benchmarks training.goodput``.

The published comparison by its own rules and by the twin's, and the twin at scale. What is emulated says so.
"""

from __future__ import annotations

from benchmarks.harness.rows import runner

SECTIONS = {
    "published": "published.published_rows",
    "twin": "month.twin_rows",
}

run = runner(__name__, SECTIONS)
