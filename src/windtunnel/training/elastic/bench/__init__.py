"""What training that survives is judged by: ``windtunnel bench training.elastic``."""

from __future__ import annotations

from windtunnel.bench.rows import runner

SECTIONS = {"forecast": "forecast.forecast_rows"}

run = runner(__name__, SECTIONS)
