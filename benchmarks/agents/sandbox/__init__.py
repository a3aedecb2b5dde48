"""The comparison that sandboxes are judged by: ``python -m benchmarks agents.sandbox``.

All policies run side by side on the same sessions in one run: what the policy decides (semantic), everything
every turn (full), files every turn, and nothing but the conversation. Published figures are those of Crab
(arXiv 2604.28138). Whatever a section makes lies in a home folder of its own and is removed with it.
"""

from __future__ import annotations

from benchmarks.harness.rows import runner

# the times of single operations first: what the long sections leave to be written would slow them
SECTIONS = {
    "freeze": "latency.freeze_rows",
    "fork": "latency.fork_rows",
    "peer": "latency.peer_rows",
    "calls": "calls.calls_rows",
    "loaded": "calls.loaded_rows",
    "recovery": "recovery.recovery_rows",
    "quota": "quota.quota_rows",
    "false-none": "volume.false_none_rows",
    "bytes": "volume.bytes_rows",
    "shares": "volume.shares_rows",
    "overhead": "overhead.overhead_rows",
    "thinking": "overhead.thinking_rows",
    "twin": "overhead.twin_rows",
}

run = runner(__name__, SECTIONS, missing="harness.missing")
