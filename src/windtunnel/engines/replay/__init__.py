"""Replay: from the execution graphs of many ranks to the time at which everything happens.

Every rank has a host thread that issues nodes in order and device queues (streams) that run them first in,
first out; *joins* (collectives and messages) start when all their members are ready. `replay` gives all
times, `critical_path` what the job was waiting for, and `symmetry` shrinks a job to one rank of each kind
without changing a time.
"""

from windtunnel.engines.replay.engine import replay
from windtunnel.engines.replay.layout import Program, ReplayJob, ReplayResult, Stalled
from windtunnel.engines.replay.path import ISSUE, RUN, TRANSFER, Path, critical_path
from windtunnel.engines.replay.symmetry import colour, job_colours, quotient

__all__ = [
    "ISSUE", "RUN", "TRANSFER", "Path", "Program", "ReplayJob", "ReplayResult", "Stalled", "colour",
    "critical_path", "job_colours", "quotient", "replay",
]  # fmt: skip
