"""What gradient synchronisation is judged by: ``python -m benchmarks training.gradsync``.

Every baseline runs in the same call; published figures are those of Espresso, Cupcake, DRAGONN and ZEN.
"""

from __future__ import annotations

from benchmarks.harness.rows import runner

SECTIONS = {
    "strategy": "strategy.strategy_rows", "live": "live.live_rows", "fusion": "fusion.fusion_rows",
    "encode": "codecs.encode_rows", "accuracy": "accuracy.accuracy_rows", "steps": "accuracy.needed_rows",
    "sparse": "sparse.sparse_rows",
    "sparse-16": "sparse.many_rows",
}  # fmt: skip

run = runner(__name__, SECTIONS)
