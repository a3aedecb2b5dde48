"""The files of a run that are looked at: report.html, timeline.json.gz, graph/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from windtunnel.training.emulate.run import Outcome


def write_pictures(
    directory: Path, outcome: Outcome, summary: dict[str, Any], timeline_ranks: tuple[int, ...]
) -> None:
    """Write the pictures of ``outcome``."""
