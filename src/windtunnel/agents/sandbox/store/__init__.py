"""What is kept of sandboxes: process images page by page, manifests, and their export."""

from windtunnel.agents.sandbox.store.export import destination, export_checkpoint, import_checkpoint
from windtunnel.agents.sandbox.store.store import StaleCopy, Store, new_id

__all__ = [
    "StaleCopy",
    "Store",
    "destination",
    "export_checkpoint",
    "import_checkpoint",
    "new_id",
]
