"""What is kept of sandboxes: process images page by page, manifests, the log of turns, and their export."""

from windtunnel.agents.sandbox.live.images.export import export_checkpoint
from windtunnel.agents.sandbox.live.images.fault import ImageError
from windtunnel.agents.sandbox.live.images.fetch import import_checkpoint
from windtunnel.agents.sandbox.live.images.manifests import Manifests, new_id
from windtunnel.agents.sandbox.live.images.store import Kept, PageStore, StoreStats
from windtunnel.agents.sandbox.live.images.turns import TurnLog

__all__ = [
    "ImageError",
    "Kept",
    "Manifests",
    "PageStore",
    "StoreStats",
    "TurnLog",
    "export_checkpoint",
    "import_checkpoint",
    "new_id",
]
