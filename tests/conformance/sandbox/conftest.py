"""Fixtures of real sandboxes, as in the sandbox's own tests."""

from agents.sandbox.conftest import home, host

__all__ = ["home", "host"]
