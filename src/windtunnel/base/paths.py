"""Where windtunnel keeps things: what outlives a command, what can be made again, what a whole host shares.

An empty variable counts as unset (XDG Base Directory Specification). No folder is made here.
"""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """The run store and the runs' files: ``$WINDTUNNEL_HOME``, else `data`."""
    own = os.environ.get("WINDTUNNEL_HOME")
    return Path(own).expanduser().absolute() if own else data()


def data() -> Path:
    """What this user keeps: ``windtunnel`` in ``$XDG_DATA_HOME``, else in ``~/.local/share``."""
    directory = os.environ.get("XDG_DATA_HOME")
    return (Path(directory) if directory else Path.home() / ".local" / "share") / "windtunnel"


def cache() -> Path:
    """What can be made again: ``windtunnel`` in ``$XDG_CACHE_HOME``, else in ``~/.cache``."""
    directory = os.environ.get("XDG_CACHE_HOME")
    return (Path(directory) if directory else Path.home() / ".cache") / "windtunnel"


def profiles() -> Path:
    """What was calibrated by this user."""
    return home() / "profiles"


def of_host() -> Path:
    """What all users of a host share: /var/lib/windtunnel for root, else `data`."""
    return Path("/var/lib/windtunnel") if os.geteuid() == 0 else data()
