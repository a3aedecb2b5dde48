"""What a sandbox's turn did: net changes of files, and what its processes did."""

from windtunnel.agents.sandbox.live.inspect.fault import InspectError
from windtunnel.agents.sandbox.live.inspect.inspector import Inspector, open_inspector

__all__ = ["InspectError", "Inspector", "open_inspector"]
