"""What training that survives is judged by: ``python -m benchmarks training.elastic``.

Real jobs on emulated hosts of this computer, struck from outside. Whatever a section makes lies in a folder
of its own, and is removed with it.
"""

from __future__ import annotations

from benchmarks.harness.rows import runner

SECTIONS = {name: f"{name}.{name}_rows" for name in ("forecast", "loops")}

run = runner(__name__, SECTIONS, timed=("forecast",))
