"""Which kinds of things this host brings back: each is held by a small program, dumped, killed and restored.

The programs (``criu/kinds``) run in a real sandbox without files of its own: the host's /usr is bound into an
empty root. All are dumped in one tree; where CRIU refuses that, halves are tried until those that it refuses
stand alone. Each program says itself whether all is as it was. This is done by a process in a mount
namespace of its own, so that nothing stays mounted, however it ends; the answer is kept per program and boot.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from windtunnel.agents.sandbox.errors import CriuError, MachineError
from windtunnel.agents.sandbox.live import standing
from windtunnel.agents.sandbox.live.checkpoint import frozen
from windtunnel.agents.sandbox.live.criu import Criu, find_criu, kinds
from windtunnel.agents.sandbox.live.criu.find import default_prefix
from windtunnel.agents.sandbox.live.criu.kinds.__main__ import kinds as programs
from windtunnel.agents.sandbox.live.machine import CHANNEL_KEPT, Machine, walls
from windtunnel.agents.sandbox.live.place import Externals, Home
from windtunnel.agents.sandbox.model import KindTried, Limits, SandboxSpec
from windtunnel.agents.sandbox.policy.kinds import TRIED, UNDUMPED
from windtunnel.base import atomic, native
from windtunnel.base.errors import HostError
from windtunnel.base.processes import boot_id
from windtunnel.linux.mounts import MS_RDONLY, bind
from windtunnel.linux.system import locked

SECONDS = 120
LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""What an empty root needs beside /usr for its programs to start."""
BOX, PREFIX = "kinds", "trial-of-kinds-"
KEPT_SECONDS = 30 * 86400
"""How long an answer that is of no use any more (another boot, other programs) is kept."""


def known(folder: Path | None = None) -> list[KindTried]:
    """Each kind of `TRIED`, tried once per CRIU, programs and boot; ``folder`` has the files that remember.

    Empty where there is no CRIU that works, or no root.
    """
    criu = find_criu()
    if criu is None or os.geteuid() != 0:
        return []
    folder = folder or default_prefix()
    folder.mkdir(parents=True, exist_ok=True)
    state = criu.path.stat()
    key = native.digest(
        [*_programs(), Path(__file__)],
        f"{criu.path} {state.st_mtime_ns} {state.st_size} {boot_id()} {' '.join(TRIED)}",
    )
    file = folder / f"kinds-{key}.json"
    with locked(folder / "kinds.lock"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            return [KindTried(**one) for one in json.loads(file.read_text())]
        for left in folder.glob(f"{PREFIX}*"):
            if left.stat().st_mtime < time.time() - 2 * SECONDS:
                _removed(left)
        found = _tried_apart()
        if not any(one.back is None for one in found):
            for old in folder.glob("kinds-*.json"):
                if old.stat().st_mtime < time.time() - KEPT_SECONDS:
                    old.unlink()
            atomic.replace(file, json.dumps([vars(one) for one in found]))
    return found


def _tried_apart() -> list[KindTried]:
    """The answer of a process of its own; its mounts end with it, and then its folder can be removed."""
    with contextlib.ExitStack() as stack:
        try:
            folder = tempfile.mkdtemp(prefix=PREFIX, dir=default_prefix())
            stack.callback(_removed, Path(folder))
            command = [
                "unshare",
                "--mount",
                "--propagation",
                "private",
                sys.executable,
                "-m",
                __name__,
                folder,
            ]
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS
            )
            return [KindTried(**one) for one in json.loads(done.stdout)]
        except (OSError, subprocess.TimeoutExpired, ValueError, TypeError) as error:
            return [_told(name, None, f"it could not be tried: {error}") for name in TRIED]


def _removed(folder: Path) -> None:
    """Nothing is left of a trial, nor of one whose process was killed."""
    with contextlib.suppress(HostError):
        Machine.clear(Home(folder / "home"), BOX)
    shutil.rmtree(folder, ignore_errors=True)


def tried(folder: Path, names: Sequence[str] = TRIED) -> list[KindTried]:
    """Try the kinds ``names`` now, with files in ``folder``; this process's mounts stay there."""
    criu = find_criu()
    assert criu is not None
    try:
        root, binds = _root(folder)
        why: dict[str, str] = {}
        together = [name for name in names if name not in UNDUMPED]
        for some in (together, *([name] for name in names if name in UNDUMPED)):
            if some:
                _halves(criu, folder, root, binds, some, why)
        return [_told(name, not why[name], why[name]) for name in names]
    except (HostError, OSError) as error:
        return [_told(name, None, f"it could not be tried: {error}") for name in names]


def _halves(
    criu: Criu,
    folder: Path,
    root: Path,
    binds: tuple[tuple[str, str, Path], ...],
    names: list[str],
    why: dict[str, str],
) -> None:
    """Fill ``why``: empty for what comes back. What cannot be dumped is found by trying halves."""
    try:
        why.update(_brought_back(criu, folder, root, binds, names))
    except CriuError as refused:
        if len(names) == 1:
            # whose it is says nothing: it is the program's
            why[names[0]] = f"CRIU: {str(refused).rpartition(' inside) ')[2]}"
            return
        middle = len(names) // 2
        for half in (names[:middle], names[middle:]):
            _halves(criu, folder, root, binds, half, why)


def _brought_back(
    criu: Criu, folder: Path, root: Path, binds: tuple[tuple[str, str, Path], ...], names: list[str]
) -> dict[str, str]:
    """Why each of ``names`` is not as it was after a restore; empty for those that are. Raises CriuError
    where not all of them can be dumped or restored together."""
    home, spec = Home(folder / "home"), SandboxSpec(name=BOX, limits=Limits(pids=None))
    work = Path(tempfile.mkdtemp(dir=folder))
    images = work / "images"
    machine = Machine.start(home, spec, root)
    try:
        said = _ask(machine, "start", work.name, names)
        with frozen(machine.cgroup):
            stood = standing.inventory(machine.cgroup.pids(), machine.pid)
            criu.dump(machine.pid, images, _with(machine.externals, binds))
            channel = machine.kept_channel()
        machine.stop()
        (images / CHANNEL_KEPT).write_bytes(channel)
        externals = _with(Machine.prepare(home, spec, root), binds)
        Machine.lay_channel(externals, images / CHANNEL_KEPT)

        def look(first: int) -> None:
            walls.seal(first)
            standing.put_right(stood, externals.freezer, first)

        pid = criu.restore(images, externals, meanwhile=look)
        machine = Machine.adopt(home, spec, root, pid)
        said |= _ask(machine, "check", work.name, names)
        return {name: "" if words == "right" else words for name, words in said.items()}
    finally:
        machine.close()
        Machine.clear(home, spec.name)


def _ask(machine: Machine, order: str, state: str, names: Sequence[str]) -> dict[str, str]:
    command = f"cd /opt && exec {_python()} -B -m kinds {order} /tmp/{state} {' '.join(names)} 2>&1"
    said = machine.run(f"( {command} )", timeout=SECONDS / 2).text
    found = dict(line.split(" ", 1) for line in said.splitlines() if line.split(" ", 1)[0] in names)
    if found.keys() != set(names):
        raise MachineError(f"the programs did not start: {said[-200:].strip()}")
    return found


def _python() -> str:
    return os.path.realpath(sys.executable)


def _with(externals: Externals, binds: tuple[tuple[str, str, Path], ...]) -> Externals:
    return replace(externals, mounts=(*externals.mounts, *binds))


def _root(folder: Path) -> tuple[Path, tuple[tuple[str, str, Path], ...]]:
    """An empty root with the host's programs bound into it, read-only, and these mounts for CRIU."""
    root = folder / "root"
    for name in ("usr", "etc", "tmp", "opt/kinds"):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    for file in _programs():
        shutil.copy(file, root / "opt/kinds" / file.name)
    wanted = [Path("/usr")]
    for name in LINKS:
        path = Path("/", name)
        if path.is_symlink():
            (root / name).symlink_to(os.readlink(path))
        elif path.is_dir():
            wanted.append(path)
    own = Path(_python()).parents[1]
    if not own.is_relative_to("/usr"):
        wanted.append(own)
    made = []
    for number, path in enumerate(wanted):
        there = root / path.relative_to("/")
        there.mkdir(parents=True, exist_ok=True)
        bind(path, there, MS_RDONLY)
        made.append((str(path), f"host-{number}", there))
    return root, tuple(made)


def _programs() -> list[Path]:
    return sorted(Path(kinds.__file__).parent.glob("*.py"))


def _told(name: str, back: bool | None, why: str) -> KindTried:
    words = " ".join((programs()[name].__doc__ or "").split())
    return KindTried(name, words.rstrip("."), back, why.removeprefix("wrong: "))


if __name__ == "__main__":
    print(json.dumps([vars(one) for one in tried(Path(sys.argv[1]), sys.argv[2:] or TRIED)]))
