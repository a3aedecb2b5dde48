"""The paper prints a queue's delay of 1.38 ms against about 13 ms under CUBIC (1 Gb/s, 24 flows); here all
arms stand side by side in this run, at 200 Mb/s."""

from benchmarks.harness.rows import runner

SECTIONS = {"twin": "twin.twin_rows", "kernel": "kernel.kernel_rows"}
run = runner(__name__, SECTIONS)
