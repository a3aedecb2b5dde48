"""What training that survives is judged by: ``python -m benchmarks training.elastic``.

Real jobs on emulated hosts of this computer, struck from outside. Whatever a section makes lies in a folder
of its own, and is removed with it.
"""

from __future__ import annotations

from benchmarks.harness.rows import runner

SECTIONS = {"loops": "loops.loops_rows"}

run = runner(__name__, SECTIONS)
