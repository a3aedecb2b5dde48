"""What a block of memory was asked for, in words: of the module, the parameter, or the line of the script.

Memory that modules ask for in forward is named by the module's path, what their backward asks for likewise.
Parameters, gradients and optimizer state are named by the parameter. What is left, such as a loss or a
model's set-up, is named by the line of the user's script.
"""

from __future__ import annotations

from windtunnel.training.emulate.graph import Category, Phase, Slice
from windtunnel.training.emulate.policy.groups import call_site

LARGE_BYTES = 1 << 20
"""From here on the line that asks outside modules is written down (`native/device.cpp`)."""

OF_PARAMETER = {
    Category.PARAMETER: "parameter {}", Category.GRADIENT: "gradient of {}",
    Category.OPTIMIZER: "optimizer state of {}",
}  # fmt: skip
OF_MODULE = {Phase.BACKWARD: "backward of {}", Phase.RECOMPUTE: "recomputation of {}"}
OUTSIDE = {
    Category.PARAMETER: "parameters", Category.GRADIENT: "gradients",
    Category.OPTIMIZER: "optimizer state", Category.ACTIVATION: "activations outside modules",
    Category.COMMUNICATION: "communication buffers", Category.TEMPORARY: "temporaries outside modules",
}  # fmt: skip
"""What is told of blocks that no module asked for, all of a category together."""


def purpose(slice: Slice, event: int) -> str:
    """What the allocation at ``event`` is for, such as ``backward of layers.3.mlp``. Never nothing."""
    row = slice.events[event]
    block, phase = int(row["ref"]), Phase(int(row["phase"]))
    category = Category(slice.block_category.get(block, Category.TEMPORARY))
    name = slice.block_name.get(block)
    if name is not None and category in OF_PARAMETER:
        return OF_PARAMETER[category].format(name)
    path = scope(slice, int(row["scope"]))
    if path:
        return OF_MODULE.get(phase, "{}").format(path)
    if phase == Phase.OPTIMIZER:
        return "the optimizer's step"
    if phase == Phase.BACKWARD:
        return "backward"
    site = call_site(slice, event) if int(row["value"]) >= LARGE_BYTES else ""
    if site:
        return site
    return "set-up" if event < slice.steps[0][1] else "the step, outside modules"


def scope(slice: Slice, index: int) -> str:
    """The module path with that number, or nothing."""
    return slice.scopes[index] if 0 <= index < len(slice.scopes) else ""
