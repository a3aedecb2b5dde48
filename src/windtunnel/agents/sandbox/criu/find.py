"""Where CRIU is (an own one first, then the system's), and whether it works here.

Working means a dump and a restore of one tiny process, and nothing less: ``criu check`` says what the kernel
offers, not whether this program can use it; a CRIU that is too old for the kernel passes it and fails at the
first dump. The answer is kept per program and boot.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from windtunnel.agents.sandbox.criu import process
from windtunnel.agents.sandbox.criu.run import Criu
from windtunnel.agents.sandbox.errors import CriuError
from windtunnel.base import atomic, paths
from windtunnel.base.processes import boot_id
from windtunnel.linux.system import in_sbin

SHA256 = "29ec0ee09e296479fe7048c80980e8ef1d0684d0b0204c2b101dfea19f6725b9"
"""Of the source that ``setup`` builds."""
PATCHES = tuple(sorted((Path(__file__).parent / "patches").glob("*.patch")))


def default_prefix() -> Path:
    """The folder into which ``setup`` installs: of the machine for root, else of the user."""
    return paths.of_host() / "criu"


def find_criu() -> Criu | None:
    """The CRIU to use: ``$WINDTUNNEL_CRIU``, the own folder, PATH; None when there is none."""
    given = os.environ.get("WINDTUNNEL_CRIU")
    system = in_sbin("criu") if not given and os.geteuid() == 0 else shutil.which("criu")
    for candidate in (given, str(default_prefix() / "bin" / "criu"), system):
        if candidate and os.access(candidate, os.X_OK) and (criu := read_program(Path(candidate))):
            return criu
    return None


def read_program(program: Path) -> Criu | None:
    """The CRIU at ``program``, by what it says of itself; None when that is no CRIU."""
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"Version: *v?(\d+(?:\.\d+)*)", said)
    if match is None:
        return None
    version = tuple(int(part) for part in match.group(1).split("."))
    return Criu(program, version, patched=f"GitID: {build_id()}" in said)


@cache
def build_id() -> str:
    """What a CRIU of the known source with the patches of this package says as its ``GitID``."""
    digest = hashlib.sha256(SHA256.encode())
    for patch in PATCHES:
        digest.update(patch.read_bytes())
    return f"windtunnel-{digest.hexdigest()[:12]}"


SKIP = ["--network-lock", "skip"]
SECONDS = 30
TRIES = 3


def trial(criu: Criu) -> str:
    """Why ``criu`` does not work on this machine, in words; empty when it does."""
    if os.geteuid() != 0:
        return "it needs root (or CAP_CHECKPOINT_RESTORE and CAP_SYS_ADMIN) to dump and restore"
    process.forget_half_written_cache()
    said = ""
    for _ in range(TRIES):
        try:
            _dump_and_restore(criu)
        except CriuError as failed:
            # the restored process wants its old number back, which another may have got meanwhile
            said = str(failed)
            continue
        return ""
    return said


def known_trial(criu: Criu, memory: Path) -> str:
    """``trial``, asked once per program and boot; ``memory`` is the file that remembers."""
    state = criu.path.stat()
    key = f"{criu.path} {state.st_mtime_ns} {state.st_size} {boot_id()} {os.geteuid()}"
    try:
        kept = json.loads(memory.read_text())
        if kept["key"] == key:
            return str(kept["said"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    said = trial(criu)
    with contextlib.suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        atomic.replace(memory, json.dumps({"key": key, "said": said}))
    return said


def _dump_and_restore(criu: Criu) -> None:
    with tempfile.TemporaryDirectory(prefix="windtunnel-trial-") as folder:
        images = Path(folder, "images")
        child = subprocess.Popen(
            ["sleep", "1000"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
        try:
            criu.dump_tree(child.pid, images, SKIP, leave_running=False, timeout=SECONDS, own_mounts=False)
        finally:
            child.kill()
            child.wait()
        pid = criu.restore_tree(images, SKIP, timeout=SECONDS, own_mounts=False)
        try:
            if b"sleep" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                raise CriuError("the restored process is not the one that was dumped")
        except OSError as gone:
            raise CriuError("the restored process ended at once") from gone
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
