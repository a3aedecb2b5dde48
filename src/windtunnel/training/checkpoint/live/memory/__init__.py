"""Checkpoints in the memory of hosts: the service in each host's agent, and a rank's access to it.

`service` puts it together, and answers what peers ask: `folder` (the slots of a host), `owner` (what local
ranks call), `replicate` (what is sent, and when), `storing` (what goes to storage), `state` (which copies
have arrived, what is committed). `client` is the rank's side. Nothing here imports torch.
"""

from windtunnel.training.checkpoint.live.memory.client import LocalMemory
from windtunnel.training.checkpoint.live.memory.messages import StaleGeneration
from windtunnel.training.checkpoint.live.memory.service import MemoryService
from windtunnel.training.checkpoint.settings import MemoryLimits

__all__ = ["LocalMemory", "MemoryLimits", "MemoryService", "StaleGeneration"]
