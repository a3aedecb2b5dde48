"""What reading, laying out and serving samples brings."""

from benchmarks.harness.rows import runner

SECTIONS = {
    "ladder": "ladder.ladder_rows", "rows": "rivals.rival_rows", "plain": "rivals.plain_rows",
    "stalls": "service.stall_rows",
}  # fmt: skip
run = runner(__name__, SECTIONS)
