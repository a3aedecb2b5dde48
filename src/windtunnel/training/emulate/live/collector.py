"""Python's garbage collector runs at fixed points of the script, so that two ranks free the same memory at
the same place.

Tensors in reference cycles are freed when the collector runs, and it runs by counts of objects that differ
from process to process. Here it runs every so many modules entered and at the end of a step: often, as it
does in a real run. A script that switches it off (``gc.disable()``) gets its wish.
"""

from __future__ import annotations

import gc

MODULES = 32
"""Modules entered between two young collections."""


class Collector:
    """Runs the collector instead of its own counters."""

    def __init__(self) -> None:
        self.enabled = True
        self.entered = 0

    def install(self) -> None:
        """Take over from the automatic collector. Call once."""
        gc.disable()
        gc.enable = lambda: setattr(self, "enabled", True)
        gc.disable = lambda: setattr(self, "enabled", False)
        gc.isenabled = lambda: self.enabled

    def module_entered(self) -> None:
        """Count a module; now and then, collect what is young."""
        self.entered += 1
        if self.enabled and self.entered % MODULES == 0:
            gc.collect(1)

    def step_ended(self) -> None:
        """Collect everything: a step begins without the cycles of the one before, and counts from nothing."""
        self.entered = 0
        if self.enabled:
            gc.collect()
