"""Replay: from the execution graphs of many ranks to the time at which everything happens.

Every rank has a host thread that issues nodes in order and device queues (streams) that run them first in,
first out; *joins* (collectives and messages) start when all their members are ready. `replay` gives all
times; `colour` finds the ranks that do everything at the same instants, of which one need be replayed.
"""

from windtunnel.engines.replay.engine import replay
from windtunnel.engines.replay.layout import Program, ReplayJob, ReplayResult, Stalled
from windtunnel.engines.replay.symmetry import colour

__all__ = ["Program", "ReplayJob", "ReplayResult", "Stalled", "colour", "replay"]
