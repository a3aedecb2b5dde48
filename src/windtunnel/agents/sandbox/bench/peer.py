"""The same load under ``runc checkpoint`` and ``runc restore``, in the same run, with the same CRIU.

runc saves the processes only: no snapshot of the files, no page store, no manifest. Here all of that is in
the figure.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from windtunnel.agents.sandbox.bench.harness import opened, own_home
from windtunnel.agents.sandbox.bench.latency import SERVER, asked, serving
from windtunnel.agents.sandbox.errors import SandboxError
from windtunnel.agents.sandbox.live.host import Host
from windtunnel.bench.rows import Row, left_out

TIMES, QUICK_TIMES = 10, 3
SECTION = "peer"


def peer_rows(quick: bool) -> Iterator[Row]:
    program = shutil.which("runc")
    if program is None:
        yield left_out(SECTION, "runc", "left out: not on PATH; 'apt-get install runc' supplies it")
        return
    times = QUICK_TIMES if quick else TIMES
    with own_home() as home, opened(home) as host:
        with _container(Path(program), home, host) as runc:
            theirs, back = _theirs(runc, times)
        box = serving(host)
        ours, restored = [], []
        for number in range(times + 1):
            begin = time.monotonic()
            manifest = box.checkpoint(full=True)
            middle = time.monotonic()
            restored.append(box.restore(manifest.id).seconds)
            ours.append(middle - begin)
            asked(box, number + 2)
    version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout.split("\n")[0]
    for what, here, there in (("checkpoint", ours, theirs), ("restore", restored, back)):
        mine, other = statistics.median(here[1:]), statistics.median(there)
        yield Row(SECTION, f"{what} by runc", "s", measured=other, note=f"{version}; processes only")
        yield Row(SECTION, f"{what} here", "s", measured=mine, note=f"median of {times}; files too")
        yield Row(SECTION, f"{what}, here over runc", "x", measured=mine / other)


@dataclass(frozen=True)
class Runc:
    """A container of runc with the load; ``call`` runs a verb of it and gives its seconds."""

    program: Path
    folder: Path
    environment: dict[str, str]

    def call(self, *arguments: str) -> float:
        begin = time.monotonic()
        done = subprocess.run(
            [self.program, "--root", self.folder / "state", *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=120,
        )
        if done.returncode != 0:
            raise SandboxError(f"runc {arguments[0]} ended with {done.returncode}")
        return time.monotonic() - begin


@contextlib.contextmanager
def _container(program: Path, home: Path, host: Host) -> Iterator[Runc]:
    """A container on a root of the host's pool, whose server answers; removed at the end."""
    assert host.context.criu is not None
    folder = home / "runc"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "criu").symlink_to(host.context.criu.path)
    runc = Runc(program, folder, {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"})
    pool, root_name = host.context.pool, "runc"
    pool.create(root_name, pool.import_image("host"))
    try:
        root = pool.mount(root_name)
        runc.call("spec", "--bundle", str(folder))
        config = json.loads((folder / "config.json").read_text())
        config["root"] = {"path": str(root), "readonly": False}
        # no descriptor may stay on a file of the host, or CRIU cannot dump it
        script = f"exec </dev/null >/dev/null 2>&1\n{SERVER}\nwait"
        config["process"] |= {"terminal": False, "args": ["bash", "-c", script]}
        (folder / "config.json").write_text(json.dumps(config))
        try:
            runc.call("run", "--detach", "--bundle", str(folder), _name())
            deadline = time.monotonic() + 30
            while not (root / "workspace" / "ready").exists():
                if time.monotonic() > deadline:
                    raise SandboxError("the server in the container of runc does not start")
                time.sleep(0.01)
            yield runc
        finally:
            with contextlib.suppress(SandboxError):
                runc.call("delete", "--force", _name())
    finally:
        pool.unmount(root_name)
        pool.drop_box(root_name)


def _theirs(runc: Runc, times: int) -> tuple[list[float], list[float]]:
    """Seconds of so many checkpoints that leave it running, and of as many restores."""
    images = [runc.folder / f"image-{number}" for number in range(times)]
    taken = []
    for image in images:
        where = ("--image-path", str(image), "--work-path", f"{image}.work")
        taken.append(runc.call("checkpoint", "--leave-running", *where, _name()))
    back = []
    for image in images:
        runc.call("delete", "--force", _name())
        where = ("--image-path", str(image), "--work-path", f"{image}.work")
        back.append(runc.call("restore", "--detach", "--bundle", str(runc.folder), *where, _name()))
    return taken, back


def _name() -> str:
    return f"windtunnel-bench-{os.getpid()}"
