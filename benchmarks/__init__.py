"""The published comparisons, measured on this machine: ``python -m benchmarks training.emulate --quick``.

One folder a capability (of the engines one file); `harness.run` has the table of sections, and `harness` is
what they are written with. Nothing of this is shipped with the package.
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parent.parent

# Processes that a section starts find the benchmarks as this one does.
os.environ["PYTHONPATH"] = os.pathsep.join(
    dict.fromkeys([str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
)
