"""vLLM with our scheduler against vLLM with its own, on a small model built at random: both servers are up at
the same time and are asked in turn; the own engine beside them. Run it in an environment that has vLLM
(docs/vllm.md)."""

from benchmarks.harness.rows import runner

SECTIONS = {
    "speed": "rows.speed_rows", "objectives": "rows.objective_rows", "branches": "rows.branch_rows",
    "hybrid": "rows.hybrid_rows", "engine": "rows.engine_rows",
}  # fmt: skip
run = runner(__name__, SECTIONS, missing="servers.missing")
