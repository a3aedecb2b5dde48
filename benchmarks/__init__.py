"""The published comparisons, measured on this machine: ``python -m benchmarks training.emulate --quick``.

One folder a capability (of the engines one file), each with a table of sections; `harness` is what they are
written with. Nothing of this is shipped with the package.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from types import ModuleType

from windtunnel.base.errors import UserError

ROOT = Path(__file__).parent.parent
NAMES = tuple(
    sorted(
        f"{path.parent.name}.{path.stem}"
        for path in (ROOT / "benchmarks").glob("*/*")
        if path.parent.name != "harness"
        and ((path / "__init__.py").exists() or path.stem in ("flows", "packets"))
    )
)
"""What has a benchmark: capabilities, and engines of the shared ground."""

# Processes that a section starts find the benchmarks as this one does.
os.environ["PYTHONPATH"] = os.pathsep.join(
    dict.fromkeys([str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
)


def find(name: str) -> ModuleType:
    """The benchmark of that name, imported.

    Raises:
        UserError: there is none.
    """
    if name not in NAMES:
        raise UserError(f"benchmarks: {name!r} is unknown; accepted are {', '.join(NAMES)}")
    return import_module(f"benchmarks.{name}")
