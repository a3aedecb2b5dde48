"""What sharing is judged by: ``python -m benchmarks network.sharing``.

The paper prints no ratios that could be quoted ("precise", "millions"), so all arms stand side by side in
this run: the gap, a FIFO, HTB with a class for each entity (the kernel's), a policer, DRR and CSFQ (the
twin's). A share's error is the largest, over entities, of |goodput - own rate| / own rate.
"""

from __future__ import annotations

from benchmarks.harness.rows import runner

SECTIONS = {"twin": "twin.twin_rows", "kernel": "kernel.kernel_rows", "packet": "packet.packet_rows"}

run = runner(__name__, SECTIONS)
