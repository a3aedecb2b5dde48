"""Where CRIU is: an own one first, then the system's; with its version and whether it works here."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from windtunnel.agents.sandbox.live.criu.run import Criu
from windtunnel.base import paths


def default_prefix() -> Path:
    """The folder into which ``setup`` installs: of the machine for root, else of the user."""
    return paths.of_host() / "criu"


def find_criu() -> Criu | None:
    """The CRIU to use: ``$WINDTUNNEL_CRIU``, the own folder, PATH; None when there is none."""
    given = os.environ.get("WINDTUNNEL_CRIU")
    candidates = [given, str(default_prefix() / "bin" / "criu"), shutil.which("criu")]
    if not given and os.geteuid() == 0:
        candidates.append(shutil.which("criu", path="/usr/local/sbin:/usr/sbin:/sbin"))
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK):
            version = version_of(Path(candidate))
            if version:
                return Criu(Path(candidate), version)
    return None


def version_of(program: Path) -> tuple[int, ...]:
    """(4, 2, 1) for CRIU 4.2.1; empty when the program does not say."""
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.search(r"Version: *v?(\d+(?:\.\d+)*)", said)
    return tuple(int(part) for part in found.group(1).split(".")) if found else ()
