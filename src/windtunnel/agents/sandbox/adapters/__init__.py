"""Sandboxes for programs that know another interface: ``subprocess``, SWE-ReX, MCP."""
