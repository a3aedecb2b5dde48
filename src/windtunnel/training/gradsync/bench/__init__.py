"""What gradient synchronisation is judged by: ``windtunnel bench training.gradsync``."""

from __future__ import annotations

from windtunnel.bench.rows import runner

SECTIONS = {"sparse": "sparse.sparse_rows"}

run = runner(__name__, SECTIONS)
