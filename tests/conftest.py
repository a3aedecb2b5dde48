"""For all tests: nothing is timed, and what is made once for several tests is made by one worker."""

from __future__ import annotations

import ast
import functools
import gc
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Examples that hypothesis makes have no deadline either, and may come slowly on a host that does much else.
# They are the same in each run; `--hypothesis-profile drawn` has it look for new ones.
slowly = [HealthCheck.too_slow]
settings.register_profile("drawn", settings.default, deadline=None, suppress_health_check=slowly)
settings.register_profile("same", settings.get_profile("drawn"), derandomize=True)
settings.load_profile("same")

# torch asks the DNS for the name of each end of a store's connections; a lost answer costs 1 s, as it does in
# trainers, and not 10.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# What starts the tests in the background may ignore an interrupt, and all that they start would do so too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


if sys.version_info < (3, 11, 8):
    # Python's gh-106905: two threads that parse at a time, or a collection meanwhile, end in a SystemError.
    # Hypothesis and pytest parse sources at any moment.
    _parse, _parsing = ast.parse, threading.RLock()

    @functools.wraps(_parse)
    def _parse_alone(*args: Any, **named: Any) -> Any:
        with _parsing:
            collects = gc.isenabled()
            gc.disable()
            try:
                return _parse(*args, **named)
            finally:
                if collects:
                    gc.enable()

    ast.parse = _parse_alone


# Nearly all that is made while tests are collected stays: looking for garbage took half of that time.
gc.disable()


def pytest_collection_finish() -> None:
    """What is there when all tests are known stays: no test looks at two million objects again when it
    collects garbage."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 10)  # the young are many, too: what examples are made of
    gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Folders of which nothing is wanted are not read: each worker would import and rewrite all of them."""
    deselected = config.option.markexpr == "not conformance"
    return True if collection_path.name == "conformance" and deselected else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a file go to one worker where a fixture of the file, or a cached function (`GROUPED` in it),
    serves several of them."""
    for item in items:
        if "conformance" in item.path.parts:
            item.add_marker(pytest.mark.conformance)
        if item.get_closest_marker("xdist_group") is not None or not isinstance(item, pytest.Function):
            continue
        fixtures = item._fixtureinfo.name2fixturedefs.values()
        shared = any(definitions[-1].scope == "module" for definitions in fixtures if definitions)
        if shared or getattr(item.module, "GROUPED", False):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
