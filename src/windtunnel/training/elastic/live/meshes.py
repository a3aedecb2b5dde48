"""Keeps meshes of a generation that is over apart from those of the next.

torch takes two device meshes for equal that have the same ranks in the same order, whichever of them this
process is, and DTensor keeps what it worked out for a mesh in caches for the life of the process. A process
that goes on under another rank would get results on the old mesh, with the coordinates of the old rank: the
pieces that it holds would be taken for others. So meshes of two generations are never equal, and the caches
are emptied in between.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

_generation = 0
_init, _eq = DeviceMesh.__init__, DeviceMesh.__eq__


def _made(self: Any, *arguments: Any, **named: Any) -> None:
    self._windtunnel = _generation
    _init(self, *arguments, **named)


def _equal(self: Any, other: object) -> Any:
    if getattr(self, "_windtunnel", 0) != getattr(other, "_windtunnel", 0):
        return False
    return _eq(self, other)


def part() -> None:
    """Meshes made from now on differ from those before."""
    global _generation
    if not _generation:
        DeviceMesh.__init__ = _made  # type: ignore[method-assign]
        DeviceMesh.__eq__ = _equal  # type: ignore[method-assign]
    _generation += 1
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import _redistribute, debug

        with contextlib.suppress(AttributeError):  # private; without it the caches are only not freed
            debug._clear_sharding_prop_cache()
            _redistribute._gen_transform_infos.cache_clear()
            _redistribute._planner_cache.clear()
