"""Agents that learn on a host, and cannot hurt it: lent cores, cold memory, frequencies (SOL).

from windtunnel.control.node import Actuator, Model, Schedule, emulate, run
"""

import lazy_loader

# What has a heavy world (NumPy, processes) is loaded when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
