"""What a sandbox's turn did: net changes of files, and what its processes did."""

from windtunnel.agents.sandbox.live.inspect.inspector import Inspector, open_inspector

__all__ = ["Inspector", "open_inspector"]
