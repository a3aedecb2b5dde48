"""Goodput is emulated with an assumed step model of Qwen3-32B, and measured with a small model on this host.
Published figures are those of TAPER's abstract; its text, workload and devices were not in reach."""

from benchmarks.harness.rows import runner

SECTIONS = {
    "goodput": "goodput.goodput_rows", "load": "goodput.load_rows", "map": "goodput.map_rows",
    "live": "live.live_rows",
}  # fmt: skip
run = runner(__name__, SECTIONS)
