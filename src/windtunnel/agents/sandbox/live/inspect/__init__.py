"""What a sandbox's turn did: net changes of files, and what its processes did."""

from windtunnel.agents.sandbox.live.inspect.diff import DiffInspector
from windtunnel.agents.sandbox.live.inspect.inspector import Inspector

__all__ = ["DiffInspector", "Inspector"]
