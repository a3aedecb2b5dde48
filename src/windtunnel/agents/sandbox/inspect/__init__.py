"""What a sandbox's turn did: net changes of files, and what its processes did."""

from windtunnel.agents.sandbox.inspect.inspector import DiffInspector, Inspector

__all__ = ["DiffInspector", "Inspector"]
