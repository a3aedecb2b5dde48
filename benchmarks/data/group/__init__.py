"""What busy CPUs do to a chain of three replicas: engines with real-time priority, and as any process."""

from benchmarks.harness.rows import runner

SECTIONS = {"tail": "tail.tail_rows"}
run = runner(__name__, SECTIONS)
