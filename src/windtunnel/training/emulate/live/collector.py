"""Python's garbage collector runs at fixed points of the script, so that two ranks free the same memory at
the same place.

Tensors in reference cycles are freed when the collector runs, and it runs by counts of objects that differ
from process to process. Here it runs every so many modules entered and at the end of a step: often, as it
does in a real run. A script that switches it off (``gc.disable()``) gets its wish.

Autograd's thread for the device lets go of the last gradients when backward has returned already, somewhere
in what the script does next. So after each backward it is given one more node, for which it must be done
with them."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import torch

from windtunnel.training.emulate.live.native_library import unrecorded
from windtunnel.training.emulate.live.patches import replaces_backward

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

    def modules_entered(self, count: int = 1) -> None:
        """Count modules; now and then, collect what is young."""
        before = self.entered // MODULES
        self.entered += count
        if self.enabled and self.entered // MODULES > before:
            gc.collect(1)

    def step_ended(self) -> None:
        """Collect everything: a step begins without the cycles of the one before, and counts from nothing."""
        self.entered = 0
        if self.enabled:
            gc.collect()


def settle_backwards(native: ctypes.CDLL) -> None:
    """Let nothing of a backward be freed after it. Call once."""
    node: list[torch.Tensor] = []

    @replaces_backward
    def run_and_settle(run: Any, *args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        if torch._C._current_autograd_node() is None:  # else it is the backward of a part of another one
            if not node:
                with unrecorded(native), torch.enable_grad():
                    leaf = torch.zeros((), device="cuda", requires_grad=True)
                    node.extend((leaf, leaf.clone(), leaf.detach()))
            leaf, output, gradient = node
            # the backward of a copy hands the gradient on and issues nothing
            run((output,), (gradient,), True, False, (leaf,), allow_unreachable=True, accumulate_grad=False)
        return result
