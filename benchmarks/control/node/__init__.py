"""What agents that learn on a host win and harm, with faults and without safeguards."""

from benchmarks.harness.rows import runner

SECTIONS = {"faults": "rows.fault_rows", "harvest": "rows.harvest_rows", "memory": "rows.memory_rows"}
run = runner(__name__, SECTIONS)
