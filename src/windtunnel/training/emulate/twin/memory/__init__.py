"""Device memory of a rank, with PyTorch's caching allocator emulated."""

from windtunnel.training.emulate.twin.memory.config import AllocatorConfig
from windtunnel.training.emulate.twin.memory.profile import (
    CONTEXT_RESERVE,
    MemoryCurve,
    MemoryProfile,
    OutOfMemory,
    Peak,
    ScopeBytes,
    emulate_memory,
)

__all__ = [
    "CONTEXT_RESERVE",
    "AllocatorConfig",
    "MemoryCurve",
    "MemoryProfile",
    "OutOfMemory",
    "Peak",
    "ScopeBytes",
    "emulate_memory",
]
