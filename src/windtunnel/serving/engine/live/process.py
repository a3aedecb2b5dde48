"""What holds for all of the process that serves, before PyTorch and the libraries around it are imported."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

SPAN, IDLE = 0.3, 90.0
"""Seconds for which cores are watched, and the percentage of these in which an idle one does nothing."""
SWITCH = 5e-4
"""Seconds after which a thread gives way to another one in the interpreter: the engine's needs it again and
again for some microseconds."""


@contextmanager
def serving() -> Iterator[None]:
    """Libraries do not warn of kernels that are not there, and the like: errors are raised. The server's
    thread gives way to the engine's."""
    level, interval = logging.root.manager.disable, sys.getswitchinterval()
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    os.environ.update({name: value for name, value in quiet.items() if name not in os.environ})
    logging.disable(logging.WARNING)
    sys.setswitchinterval(SWITCH)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(level)
        sys.setswitchinterval(interval)


def count_idle_cores() -> tuple[int, int]:
    """How many of the cores that this process may use are idle, and how many there are. A thread that waits
    at every product for one whose core others use makes a step many times as long: so none gets a core that
    somebody has."""
    spent = psutil.cpu_times_percent(SPAN, percpu=True)
    own = [spent[core] for core in os.sched_getaffinity(0) if core < len(spent)]
    return sum(times.idle + times.iowait >= IDLE for times in own), len(own)
