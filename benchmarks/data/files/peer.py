"""The same writes on GlusterFS with three bricks (Debian's package), each through its mount."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from statistics import median

from benchmarks.data.files.modes import BLOCK, running
from benchmarks.harness.measure import conditions, in_turn, scratch
from benchmarks.harness.rows import Row, figure, left_out

BLOCKS, QUICK_BLOCKS = 500, 50
VOLUME = "windtunnel-bench"
MOUNT = """
import sys
from pathlib import Path
from windtunnel.base.keys import Keys
from windtunnel.data.files.live import client, mount
store, secret, folder = sys.argv[1:]
mount.mount(client.FileClient(store, Keys.read(Path(secret)).secret), Path(folder))
"""


def peer_rows(quick: bool) -> Iterator[Row]:
    if os.geteuid() != 0 or not shutil.which("glusterd") or not shutil.which("fusermount3"):
        yield left_out("GlusterFS, replica 3", "needs root, glusterfs-server and fuse3")
        return
    if subprocess.run(["pgrep", "-x", "glusterd"], stdout=subprocess.DEVNULL).returncode == 0:
        yield left_out("GlusterFS, replica 3", "a glusterd of this computer runs already")
        return
    blocks, load = QUICK_BLOCKS if quick else BLOCKS, conditions()
    with ours() as first, gluster() as second:
        arms: dict[str, Callable[[], list[float]]] = {
            "windtunnel, mounted": partial(written, first, blocks),
            "GlusterFS, replica 3, mounted": partial(written, second, blocks),
        }
        found = in_turn(arms, 2 if quick else 5)
    for name, rounds in found.items():
        seconds = sorted(second for each in rounds for second in each)
        yield figure(f"{name}: 16 KiB and its fsync, median", "s", median(seconds), note=load)
        yield figure(f"{name}: 99th percentile", "s", seconds[int(0.99 * len(seconds))])
    ours_, theirs = (median([sum(each) for each in rounds]) for rounds in found.values())
    yield figure("GlusterFS over windtunnel, mean", "x", theirs / ours_)


def written(folder: Path, blocks: int) -> list[float]:
    """Seconds of each block and its fsync, in a new file."""
    block, seconds = Random(1).randbytes(BLOCK), []
    file = os.open(folder / f"file-{time.monotonic_ns()}", os.O_CREAT | os.O_WRONLY)
    for _ in range(blocks):
        begun = time.perf_counter()
        os.write(file, block)
        os.fsync(file)
        seconds.append(time.perf_counter() - begun)
    os.close(file)
    return seconds


@contextlib.contextmanager
def ours() -> Iterator[Path]:
    """Three hosts, mounted."""
    with running("linefs") as (hosts, _), scratch() as folder:
        spec, mounted = hosts[0].spec, folder / "mounted"
        process = subprocess.Popen([sys.executable, "-c", MOUNT, spec.store, spec.secret, str(mounted)])
        try:
            while not os.path.ismount(mounted):
                time.sleep(0.1)
            yield mounted
        finally:
            subprocess.run(["fusermount3", "-u", "-z", str(mounted)], check=False)
            process.wait()


@contextlib.contextmanager
def gluster() -> Iterator[Path]:
    """A volume of three bricks, mounted; its daemons end with it."""
    with scratch() as folder, contextlib.ExitStack() as stack:
        mounted, host = folder / "mounted", socket.gethostname()
        mounted.mkdir()
        bricks = [f"{host}:{folder}/brick{number}" for number in range(3)]
        _run("glusterd", "--pid-file", str(folder / "pid"))
        stack.callback(lambda: subprocess.run(["pkill", "-f", "gluster(d|fsd|fs) "], check=False))
        time.sleep(3.0)
        script = ("gluster", "--mode=script", "volume")
        _run(*script, "create", VOLUME, "replica", "3", *bricks, "force")
        stack.callback(lambda: _run(*script, "delete", VOLUME))
        _run(*script, "start", VOLUME)
        stack.callback(lambda: _run(*script, "stop", VOLUME, "force"))
        _run("mount", "-t", "glusterfs", f"{host}:/{VOLUME}", str(mounted))
        stack.callback(lambda: _run("umount", "-l", str(mounted)))
        yield mounted


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
