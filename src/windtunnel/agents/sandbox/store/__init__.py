"""What is kept of sandboxes: process images page by page, manifests, and their export."""

from windtunnel.agents.sandbox.store.export import destination, export_checkpoint, import_checkpoint
from windtunnel.agents.sandbox.store.manifests import Manifests, new_id
from windtunnel.agents.sandbox.store.store import PageStore, StaleCopy

__all__ = [
    "Manifests",
    "PageStore",
    "StaleCopy",
    "destination",
    "export_checkpoint",
    "import_checkpoint",
    "new_id",
]
