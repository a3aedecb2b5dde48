"""The comparison that the emulation of training is judged by: ``python -m benchmarks training.emulate``.

Every figure is measured in this run or marked as published with its source; a target that is missed is shown
as missed, and a section that fails says why and does not lose the others.
"""

from __future__ import annotations

from benchmarks.harness.rows import runner

SECTIONS = {
    "time": "truth.time_rows", "memory": "truth.memory_rows", "speed": "speed.speed_rows",
    "engine": "speed.engine_rows", "published": "published.published_rows", "gpu": "truth.gpu_rows",
}  # fmt: skip

run = runner(__name__, SECTIONS)
