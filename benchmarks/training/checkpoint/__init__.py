"""What the comparisons of checkpoints in peers' memory share: real jobs on emulated hosts."""

from pathlib import Path

SOURCE = "GEMINI, Wang et al., SOSP 2023"
PROGRAMS = Path(__file__).parent / "programs"
