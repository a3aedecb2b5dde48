"""``python -m benchmarks data.ingest``: what reading, laying out and serving samples brings."""

from __future__ import annotations

from benchmarks.harness.rows import runner

SECTIONS = {
    "ladder": "ladder.ladder_rows",
    "rows": "rivals.rival_rows",
    "plain": "rivals.plain_rows",
    "stalls": "service.stall_rows",
}
run = runner(__name__, SECTIONS)
