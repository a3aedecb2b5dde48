"""The paper prints no ratios that could be quoted, so all arms stand side by side in this run. A share's
error is the largest, over entities, of |goodput - own rate| / own rate."""

from benchmarks.harness.rows import runner

SECTIONS = {"twin": "twin.twin_rows", "kernel": "kernel.kernel_rows", "packet": "packet.packet_rows"}
run = runner(__name__, SECTIONS)
