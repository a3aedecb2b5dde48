"""Fixtures of real sandboxes and of their parts, as in the sandbox's own tests."""

from agents.sandbox.conftest import (
    client,
    daemon_home,
    events,
    home,
    host,
    make,
    misbehaving,
    new_home,
    own_home,
    shared_daemon,
    small_root,
    spare,
)
from agents.sandbox.files.conftest import image, opened
from agents.sandbox.inspect.conftest import cell, cells, inspector
from agents.sandbox.proxy.model_bench import bench, model, proxy
from agents.sandbox.proxy.ways_out import way

__all__ = [
    "bench", "cell", "cells", "client", "daemon_home", "events", "home", "host", "image", "inspector", "make",
    "misbehaving", "model", "new_home", "opened", "own_home", "proxy", "shared_daemon", "small_root", "spare",
    "way",
]  # fmt: skip
