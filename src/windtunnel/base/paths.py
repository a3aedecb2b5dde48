"""Where windtunnel keeps what outlives a command: the run store and the runs' files."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """``$WINDTUNNEL_HOME``, else ``windtunnel`` in ``$XDG_DATA_HOME``, else ``~/.local/share/windtunnel``.

    The folder is not made. An empty variable counts as unset (XDG Base Directory Specification).
    """
    own = os.environ.get("WINDTUNNEL_HOME")
    if own:
        return Path(own).expanduser().absolute()
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "windtunnel"
