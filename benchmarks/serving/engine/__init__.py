"""What the engine is judged by: ``python -m benchmarks serving.engine``.

Speed of the twin on a million requests; the twin held against the live engine, which serve the same requests,
the twin by a step model that is measured meanwhile; and what is cached against what is not, for each family
of models.
"""

from __future__ import annotations

from benchmarks.harness.rows import runner

SECTIONS = {"speed": "rows.speed_rows", "live": "rows.live_rows"}
run = runner(__name__, SECTIONS, traced=("speed",))
