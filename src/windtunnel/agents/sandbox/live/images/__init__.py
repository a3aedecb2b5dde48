"""What is kept of sandboxes: process images page by page, manifests, the log of turns, and their export."""

from windtunnel.agents.sandbox.live.images.export import export_checkpoint, import_checkpoint
from windtunnel.agents.sandbox.live.images.manifests import Manifests, new_id
from windtunnel.agents.sandbox.live.images.store import Kept, PageStore, StoreStats

__all__ = [
    "Kept",
    "Manifests",
    "PageStore",
    "StoreStats",
    "export_checkpoint",
    "import_checkpoint",
    "new_id",
]
