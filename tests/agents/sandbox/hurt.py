"""What the tests of faults share: sandboxes' traces on the machine, small disks, and CRIU programs that
misbehave."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support.waiting import until
from windtunnel.agents.sandbox.place import Home
from windtunnel.agents.sandbox.store import CheckpointStore
from windtunnel.agents.sandbox.store.pages import FRAME
from windtunnel.linux import cgroup, mounts

COUNTER = """cat > /workspace/count.sh <<'END'
trap 'n=$((n + 1)); echo $n > /tmp/.count.new; mv /tmp/.count.new /tmp/count' USR1
n=0
echo $$ > /tmp/counter
while :; do read -t 1000 _ <> /tmp/fifo; done
END
mkfifo /tmp/fifo
bash /workspace/count.sh </dev/null >/dev/null 2>&1 &
until [ -s /tmp/counter ]; do sleep 0.01; done"""
"""A service whose memory counts the signals that it gets."""
COUNT = (
    "rm -f /tmp/count; kill -USR1 $(cat /tmp/counter); "
    "until [ -s /tmp/count ]; do sleep 0.01; done; cat /tmp/count; rm /tmp/count"
)


def turn(box: Any, command: str) -> Any:
    """Run a command that succeeds, and end the turn; what was kept of it."""
    result = box.run(command, timeout=60)
    assert result.ended == "exit" and result.exit_code == 0, result
    return box.end_turn().wait(60)


def frozen(home: Path) -> list[str]:
    """Names of the sandboxes of a home that stand still."""
    names = []
    for file in (cgroup.mounts().unified / f"windtunnel-{Home(home).tag}").glob("*/cgroup.events"):
        if "frozen 1" in file.read_text():
            names.append(file.parent.name)
    return names


def traces(home: Path) -> list[str]:
    """What a home has left on this machine: mounts, loop devices, control groups and processes."""
    home_text, tag = str(home), Home(home).tag
    left = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if home_text in line]
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            if home_text in file.read_text():
                left.append(f"{file.parent.parent.name}: {file.read_text().strip()}")
    points = cgroup.mounts()
    for point in {points.unified, *points.v1.values()}:
        if (point / f"windtunnel-{tag}").exists():
            left.append(str(point / f"windtunnel-{tag}"))
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if (home_text in line or f"windtunnel-{tag}" in line) and "pytest" not in line:
                    left.append(f"process {entry.name}: {line}")
    return left


def flip_in_place(path: Path, at: int, bits: int = 0x55) -> None:
    """As ``dd conv=notrunc`` does it."""
    file = os.open(path, os.O_RDWR)
    (old,) = os.pread(file, 1, at)
    os.pwrite(file, bytes([old ^ bits]), at)
    os.close(file)


def flip_image(store: CheckpointStore, id: str, part: float = 0.5) -> None:
    """Flip bits of the last frame that an image uses, in the file."""
    store.settle(whole=True)
    with store.reading() as db:
        number = int(store.recipe(id).places.max()) // FRAME
        (data,) = db.execute("SELECT pages FROM frame WHERE id=?", (number,)).fetchone()
    file, begin = store.path.read_bytes(), int((len(data) - 48) * part)
    # one of two places beside each other does not lie across two pages of the file
    at = max(file.find(data[place : place + 24]) for place in (begin, begin + 24)) + 12
    assert at > 12
    flip_in_place(store.path, at)
    while store._idle:  # SQLite remembers pages of the file
        store._idle.pop().close()


def flip_manifest(store: CheckpointStore, id: str, part: float = 0.5) -> Callable[[], None]:
    """Flip bits of the row of a manifest; returns what puts it right again."""
    with store.transaction() as db:
        (right,) = db.execute("SELECT data FROM manifest WHERE id=?", (id,)).fetchone()
        at = int((len(right) - 1) * part)
        wrong = right[:at] + bytes([right[at] ^ 0x10]) + right[at + 1 :]
        db.execute("UPDATE manifest SET data=? WHERE id=?", (wrong, id))

    def put_right() -> None:
        with store.transaction() as db:
            db.execute("UPDATE manifest SET data=? WHERE id=?", (right, id))

    return put_right


def checked(host: Any) -> None:
    """What must hold after every fault: nothing stands still, each checkpoint has all its parts, and a
    collection leaves nothing to collect."""
    assert frozen(host.home.path) == []
    manifests, _ = host.context.store.all()
    host.gc()
    report = host.gc(dry_run=True)
    assert report.leftovers == (), report
    assert list((host.home.path / "dumps").glob("*")) == []
    left, _ = host.context.store.all()
    assert {manifest.id for manifest in left} >= {info.tip for info in host.boxes()} - {""}
    assert len(left) <= len(manifests)
    snapshots, images = set(host.context.pool.snapshots()), set(host.context.store.images())
    of_files = {manifest.files.id for manifest in left if manifest.files}
    of_images = {manifest.image.id for manifest in left if manifest.image}
    # an id that is needed keeps both parts of that name
    assert of_files <= snapshots <= of_files | of_images, (snapshots, of_files, of_images)
    assert of_images <= images <= of_files | of_images, (images, of_files, of_images)


@contextlib.contextmanager
def small_disk(at: Path, size: str) -> Iterator[Path]:
    """A tmpfs of ``size`` mounted at ``at``."""
    at.mkdir(parents=True, exist_ok=True)
    mounts.mount("tmpfs", at, "tmpfs", 0, f"size={size}")
    try:
        yield at
    finally:
        mounts.unmount(at)


def fill(folder: Path) -> Path:
    """Write a file into ``folder`` until nothing more fits."""
    path = folder / "filling"
    with path.open("wb", buffering=0) as file:
        for size in (16 << 20, 1 << 16, 1 << 12):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
                    os.fsync(file.fileno())
    return path


def wrapped_criu(folder: Path, criu: Path, before: str) -> Path:
    """A CRIU program that does ``before`` (lines of shell; $1 is what it is asked to do) first."""
    path = folder / "criu"
    path.write_text(
        f'#!/bin/bash\nreal={criu}\n[ "$1" = --version ] && exec $real "$@"\n{before}\nexec $real "$@"\n'
    )
    path.chmod(0o755)
    # a file that is being written by a child that another thread forks meanwhile cannot be started
    until(lambda: subprocess.run([path, "--version"], capture_output=True, check=False).returncode == 0)
    return path
