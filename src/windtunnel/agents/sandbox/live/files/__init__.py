"""The roots of sandboxes: images, live trees and snapshots."""

from windtunnel.agents.sandbox.live.files.pool import Pool, open_pool
from windtunnel.agents.sandbox.live.files.tree import LeftOut

__all__ = ["LeftOut", "Pool", "open_pool"]
