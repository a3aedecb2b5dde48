"""The comparison that checkpoints in peers' memory are judged by.

Real jobs on emulated hosts of this computer, killed for real; every baseline runs in the same call. Published
figures are those of GEMINI (Wang et al., SOSP 2023). Whatever a section makes lies in a folder of its own,
and is removed with it.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.rows import runner

SOURCE = "GEMINI, Wang et al., SOSP 2023"
PROGRAMS = Path(__file__).parent / "programs"
TRAINER = PROGRAMS / "fsdp_trainer.py"
SECTIONS = {name: f"{name}.{name}_rows" for name in ("recovery", "wasted", "cost", "idle")}

run = runner(__name__, SECTIONS)
