"""What one call costs: the command line before any work, and making a sandbox.

``calls``: the figures are of whole processes of the command line, in front of a daemon, with what the shell
of a user or an agent pays: CPU time (user and system) of ``ls``, and from the start to the end of ``create``.
A tarball that is given as the image again has not changed.

``loaded``: a sandbox with 33 MiB that it touches all the time, while others want all CPUs: two busy loops for
each CPU, in as many sandboxes. It stands still for a checkpoint, and must not wait for them.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.agents.sandbox.harness import new_name, opened, own_home
from benchmarks.harness.rows import Row, figure
from windtunnel.agents.sandbox.client import Client, connect
from windtunnel.agents.sandbox.errors import SandboxError
from windtunnel.agents.sandbox.model import SandboxSpec

CLI = (sys.executable, "-c", "from windtunnel.cli.main import main; main()", "sandbox")
TIMES, QUICK_TIMES = 20, 5
ZEROS = 680 << 20
"""Bytes of the image's tarball beside the programs of this host."""
HELD = """python3 -c '
import time
held = bytearray(33 << 20)
for at in range(0, len(held), 4096):
    held[at] = 1
open("/workspace/ready", "w").close()
while True:
    time.sleep(0.02)
    held[0] ^= 1
' >/dev/null 2>&1 </dev/null &
until [ -e /workspace/ready ]; do sleep 0.01; done"""
BUSY = "for loop in 1 2; do sh -c 'while :; do :; done' & done"


def calls_rows(quick: bool) -> Iterator[Row]:
    count = QUICK_TIMES if quick else TIMES
    with own_home() as home:
        tarball = _tarball(home, 0 if quick else ZEROS)
        with _served(home) as client:
            client.create(SandboxSpec(new_name("warm")))
            used = [_call(home, "ls", "--json")[0] for _ in range(count + 1)][1:]
            yield figure("CPU of a command before any work (ls)", "s", used, "<= 150 ms")
            taken, note = _created(home, client, count), "from start to end of the command"
            yield figure("create, warm", "s", taken, "<= 300 ms", note=note)
            taken = _created(home, client, count, "--image", str(tarball))
            note = f"a tarball of {tarball.stat().st_size / 1e6:.0f} MB that is known"
            yield figure("create --image of an unchanged tarball", "s", taken, "<= 500 ms", note=note)


def loaded_rows(quick: bool) -> Iterator[Row]:
    count, cpus = QUICK_TIMES if quick else TIMES, os.cpu_count() or 1
    with own_home() as home, opened(home) as host:
        box = host.create(SandboxSpec(new_name("held")))
        box.run(HELD, timeout=60)
        others = [host.create(SandboxSpec(new_name("busy"))) for _ in range(cpus)]
        for words in ("", f", {2 * cpus} busy loops on {cpus} CPUs"):
            taken, frozen, back = [], [], []
            for _ in range(count + 1):
                begin = time.monotonic()
                manifest = box.checkpoint(full=True)
                taken.append(time.monotonic() - begin)
                frozen.append(manifest.freeze_seconds)
                back.append(box.restore(manifest.id).seconds)
            yield figure(f"full checkpoint of 33 MiB{words}", "s", taken[1:], note="until it is safe")
            yield figure(f"… it stands still for{words}", "s", frozen[1:])
            yield figure(f"restore of 33 MiB{words}", "s", back[1:])
            if not words:
                for other in others:
                    other.run(BUSY)


@contextlib.contextmanager
def _served(home: Path) -> Iterator[Client]:
    """The daemon of a home; it ends with the block, and the sandboxes with it."""
    with connect(home) as client:
        try:
            yield client
        finally:
            for info in client.boxes():
                client.remove(info.name)
            client.down()


def _call(home: Path, *words: str) -> tuple[float, float]:
    """CPU seconds and seconds of one command of the command line."""
    # what is installed has its bytecode beside it, and is not compiled by every call
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [*CLI, "--home", str(home), *words]
    begin = time.monotonic()
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        said = process.stderr.read().decode(errors="replace").strip()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SandboxError(f"'sandbox {' '.join(words)}' ended with {process.returncode}: {said}")
    return used.ru_utime + used.ru_stime, time.monotonic() - begin


def _created(home: Path, client: Client, times: int, *options: str) -> list[float]:
    """Seconds of each ``create`` but the first."""
    seconds = []
    for _ in range(times + 1):
        name = new_name("made")
        seconds.append(_call(home, "create", name, *options)[1])
        client.remove(name)
    return seconds[1:]


def _tarball(home: Path, zeros: int) -> Path:
    """The image ``host`` with so many bytes more as a tarball, beside the home's own folders."""
    path = home / "image.tar"
    with opened(home) as host, contextlib.ExitStack() as closing:
        pool, name = host.context.pool, new_name("image")
        pool.create(name, pool.import_image("host"))
        closing.callback(pool.drop_box, name)
        root = pool.mount(name)
        closing.callback(pool.unmount, name)
        with (root / "zeros").open("wb") as file:
            file.truncate(zeros)
        subprocess.run(["tar", "-C", str(root), "-cf", str(path), "."], check=True, timeout=300)
    return path
