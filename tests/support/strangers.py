"""For `preloaded`: what trainers that nobody here wrote import beside themselves, before any of them runs.

None of it looks at devices; the trainers themselves are imported where they run.
"""

from __future__ import annotations

import contextlib
import importlib

import support.absent_device  # noqa: F401 - before anything else

for name in (
    "jinja2", "mpmath", "networkx", "pandas", "scipy.optimize", "scipy.stats", "sympy",
    "torch._dynamo.convert_frame", "torch._inductor.compile_fx", "torch.onnx",
):  # fmt: skip
    with contextlib.suppress(ImportError):  # some are there only where trainers are
        importlib.import_module(name)
