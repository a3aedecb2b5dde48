"""Fixtures that lie beside the tests of the daemon."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "daemon"))

from daemons import client, daemon_home, shared_daemon

__all__ = ["client", "daemon_home", "shared_daemon"]
