"""What decisions, tasks and messages cost in tables, beside what they cost without, and a cluster of rows."""

from benchmarks.harness.rows import runner

SECTIONS = {
    "decisions": "costs.decision_rows", "tasks": "costs.task_rows", "messages": "costs.message_rows",
    "twin": "costs.twin_rows",
}  # fmt: skip
run = runner(__name__, SECTIONS)
