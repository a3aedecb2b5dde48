"""What stands in a sandbox when its image is taken, and whether all of it came back."""

from windtunnel.agents.sandbox.inventory.mend import put_right
from windtunnel.agents.sandbox.inventory.read import alarms, inventory

__all__ = ["alarms", "inventory", "put_right"]
