"""The engine over real models, and what holds for all of the process that serves, before PyTorch and the
libraries around it are imported."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

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
