"""What windows for a host's senders are judged by: ``python -m benchmarks network.hostrate``.

The paper prints a queue's delay of 1.38 ms against about 13 ms under CUBIC (1 Gb/s, 24 flows); here all arms
stand side by side in this run, at 200 Mb/s: windows by weights and as published, CUBIC, Reno and BBR on a
FIFO of 1,000 packets, a FIFO simply cut to the windows' upper mark, bandwidth shares (Augmented
Queue), DCTCP; in the twin CoDel and fq_codel, too.
"""

from __future__ import annotations

from benchmarks.harness.rows import runner

SECTIONS = {"twin": "twin.twin_rows", "kernel": "kernel.kernel_rows"}

run = runner(__name__, SECTIONS)
