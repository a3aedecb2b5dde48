"""Imports without the garbage collector: it would go through all that they make again and again.

What modules make is there to stay. Looking through it costs a fourth of the time of importing torch, and for
the rest of the process's life again at each full collection; so it is left out of them, too.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Import within this. The collector goes on afterwards, if it was on, and passes over what is there."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
