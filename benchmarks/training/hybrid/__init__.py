"""Live ranks beside virtual ones, against real worlds: ``python -m benchmarks training.hybrid``.

Live ranks are a part of `training.emulate`; their comparison takes worlds of up to eight real ranks, and so
its own while.
"""

from __future__ import annotations

from benchmarks.harness.rows import runner

SECTIONS = {name: f"truth.{name}_rows" for name in ("parameters", "memory", "time", "scale")}

run = runner(__name__, SECTIONS)
