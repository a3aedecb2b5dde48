"""What sandboxes are judged by. All policies run side by side on the same sessions in one run; published
figures are those of Crab (arXiv 2604.28138). What a section makes lies in a home of its own and goes with
it."""

from benchmarks.harness.rows import runner

SECTIONS = {
    "freeze": "latency.freeze_rows", "fork": "latency.fork_rows", "peer": "latency.peer_rows",
    "calls": "calls.calls_rows", "loaded": "calls.loaded_rows", "recovery": "recovery.recovery_rows",
    "bytes": "volume.bytes_rows",
    "overhead": "overhead.overhead_rows",
    "thinking": "overhead.thinking_rows", "twin": "overhead.twin_rows",
}  # fmt: skip
run = runner(__name__, SECTIONS, missing="harness.missing")
