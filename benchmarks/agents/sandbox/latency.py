"""How long a fork, a restore and the freeze of a checkpoint take: one sandbox with a shell and a web server.

Between two checkpoints the server is asked once, so that it has memory to save. A fork counts until ``fork``
returns, which is when it takes commands; and a second time until its server has answered. Published: forks in
88 ms on average by the authors of Crab (arXiv 2604.28138), on 32 CPUs.

``peer``: the same load under ``runc checkpoint`` and ``runc restore``, in the same run, with the same CRIU.
runc saves the processes only: no snapshot of the files, no page store, no manifest. Here all of that is in
the figure.

What one call costs: the command line before any work, and making a sandbox.

``calls``: the figures are of whole processes of the command line, in front of a daemon, with what the shell
of a user or an agent pays: CPU time (user and system) of ``ls``, and from the start to the end of ``create``.
A tarball that is given as the image again has not changed.

``loaded``: a sandbox with 33 MiB that it touches all the time, while others want all CPUs: two busy loops for
each CPU, in as many sandboxes. It stands still for a checkpoint, and must not wait for them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.agents.sandbox.harness import SOURCE, Seat, new_name, opened, own_home
from benchmarks.harness.rows import Row, figure, need
from windtunnel.agents.sandbox.box import Box
from windtunnel.agents.sandbox.client import Client, connect
from windtunnel.agents.sandbox.errors import SandboxError
from windtunnel.agents.sandbox.host import Host
from windtunnel.agents.sandbox.model import SandboxSpec

TIMES, QUICK_TIMES = 20, 6
SERVER = """cat > /workspace/server.py <<'END'
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    served = 0
    def do_GET(self):
        Handler.served += 1
        self.send_response(200); self.end_headers(); self.wfile.write(b"%d" % Handler.served)
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", 8000), Handler)
open("/workspace/ready", "w").close()
server.serve_forever()
END
python3 /workspace/server.py >/dev/null 2>&1 </dev/null &
until [ -e /workspace/ready ]; do sleep 0.01; done"""
ASK = "exec 5<>/dev/tcp/127.0.0.1/8000; printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&5; tail -n 1 <&5; exec 5>&-"


def serving(host: Host) -> Box:
    """A sandbox with a shell and a web server that has answered once."""
    box = Seat.new(host, new_name("serving")).box
    box.run(SERVER, timeout=60)
    asked(box, 1)
    return box


def asked(box: Box, expected: int) -> None:
    """Ask the server inside; how often it was asked is in its memory."""
    said = box.run(ASK, timeout=30).stdout
    if said != str(expected).encode():
        raise SandboxError(f"the server of sandbox {box.name} answered {said!r}, not {expected}")


def fork_rows(quick: bool) -> Iterator[Row]:
    count = QUICK_TIMES if quick else TIMES
    ready, answered, restored = [], [], []
    with own_home() as home, opened(home) as host:
        box = serving(host)
        checkpoint = box.checkpoint(full=True).id
        for _ in range(count + 1):
            begin = time.monotonic()
            (fork,) = host.fork(checkpoint)
            ready.append(time.monotonic() - begin)
            asked(fork, 2)
            answered.append(time.monotonic() - begin)
            host.remove(fork.name)
        for _ in range(count):
            restored.append(box.restore(checkpoint).seconds)
            asked(box, 2)
    name, source = "fork of a warm checkpoint", f"{SOURCE}, the mean"
    yield figure(name, "s", ready[1:], "<= 75 ms", published=0.088, source=source)
    yield figure("fork, until its server has answered", "s", answered[1:])
    note = "from the sandbox's death to its going on"
    yield figure("restore of a warm checkpoint", "s", restored, "<= 80 ms", note=note)


def freeze_rows(quick: bool) -> Iterator[Row]:
    frozen, total, decided = [], [], []
    with own_home() as home, opened(home) as host:
        box = serving(host)
        box.checkpoint(full=True)
        for number in range(QUICK_TIMES if quick else TIMES):
            asked(box, number + 2)
            manifest = box.checkpoint(full=True)
            frozen.append(manifest.freeze_seconds)
            total.append(manifest.total_seconds)
            box.run("true")
            decided.append(box.end_turn().wait().decide_seconds)
    yield figure("freeze of a full checkpoint", "s", frozen, "<= 60 ms", note="shell and web server")
    yield figure("full checkpoint until it is safe", "s", total)
    yield figure("decision of a turn's class", "s", decided)


def peer_rows(quick: bool) -> Iterator[Row]:
    program = shutil.which("runc") or ""
    need("runc is not on PATH; 'apt-get install runc' supplies it" * (not program))
    # with it CRIU locks a container's network
    need(
        "iptables-restore is not on PATH; 'apt-get install iptables'" * (not shutil.which("iptables-restore"))
    )
    count = 3 if quick else 10
    with own_home() as home, opened(home) as host:
        with _container(Path(program), home, host) as runc:
            theirs, back = _theirs(runc, count)
        box = serving(host)
        ours, restored = [], []
        for number in range(count + 1):
            begin = time.monotonic()
            manifest = box.checkpoint(full=True)
            ours.append(time.monotonic() - begin)
            restored.append(box.restore(manifest.id).seconds)
            asked(box, number + 2)
    version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout.split("\n")[0]
    for what, here, there in (("checkpoint", ours, theirs), ("restore", restored, back)):
        mine, other = statistics.median(here[1:]), statistics.median(there)
        note = f"{mine * 1e3:.0f} ms, files too, over {other * 1e3:.0f} ms by {version}, processes only"
        yield figure(f"{what}, here over runc", "x", mine / other, note=note)


@dataclass(frozen=True)
class Runc:
    """A container of runc with the load; ``call`` runs a verb of it and gives its seconds."""

    program: Path
    folder: Path
    environment: dict[str, str]

    def call(self, *arguments: str) -> float:
        begin = time.monotonic()
        command = [str(self.program), "--root", str(self.folder / "state"), *arguments]
        quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        done = subprocess.run(command, env=self.environment, timeout=120, **quiet)
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


def _theirs(runc: Runc, count: int) -> tuple[list[float], list[float]]:
    """Seconds of so many checkpoints that leave it running, and of as many restores."""
    images = [str(runc.folder / f"image-{number}") for number in range(count)]
    where = {image: ("--image-path", image, "--work-path", f"{image}.work") for image in images}
    taken = [runc.call("checkpoint", "--leave-running", *where[image], _name()) for image in images]
    back = []
    for image in images:
        runc.call("delete", "--force", _name())
        back.append(runc.call("restore", "--detach", "--bundle", str(runc.folder), *where[image], _name()))
    return taken, back


def _name() -> str:
    return f"windtunnel-bench-{os.getpid()}"


CLI = (sys.executable, "-c", "from windtunnel.cli.main import main; main()", "sandbox")
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
