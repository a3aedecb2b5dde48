"""How long a fork, a restore and the freeze of a checkpoint take: one sandbox with a shell and a web server.

Between two checkpoints the server is asked once, so that it has memory to save. A fork counts until ``fork``
returns, which is when it takes commands; and a second time until its server has answered. Published: forks in
88 ms on average by the authors of Crab (arXiv 2604.28138), on 32 CPUs.

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

from benchmarks.agents.sandbox.harness import SOURCE, Seat, new_name, open_host, own_home
from benchmarks.harness.rows import Row, figure
from windtunnel.agents.sandbox.box import Box
from windtunnel.agents.sandbox.client import Client, connect
from windtunnel.agents.sandbox.errors import SandboxError
from windtunnel.agents.sandbox.host import SandboxHost
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


def serving(host: SandboxHost) -> Box:
    """A sandbox with a shell and a web server that has answered once."""
    box = Seat.new(host, new_name("serving")).box
    box.run(SERVER, timeout=60)
    ask_server(box, 1)
    return box


def ask_server(box: Box, expected: int) -> None:
    """Ask the server inside; how often it was asked is in its memory."""
    answer = box.run(ASK, timeout=30).stdout
    if answer != str(expected).encode():
        raise SandboxError(f"the server of sandbox {box.name} answered {answer!r}, not {expected}")


def fork_rows(quick: bool) -> Iterator[Row]:
    count = QUICK_TIMES if quick else TIMES
    ready, answered, restored = [], [], []
    with own_home() as home, open_host(home) as host:
        box = serving(host)
        checkpoint = box.checkpoint(full=True).id
        for _ in range(count + 1):
            begin = time.monotonic()
            (fork,) = host.fork(checkpoint)
            ready.append(time.monotonic() - begin)
            ask_server(fork, 2)
            answered.append(time.monotonic() - begin)
            host.remove(fork.name)
        for _ in range(count):
            restored.append(box.restore(checkpoint).seconds)
            ask_server(box, 2)
    name, source = "fork of a warm checkpoint", f"{SOURCE}, the mean"
    yield figure(name, "s", ready[1:], "<= 75 ms", published=0.088, source=source)
    yield figure("fork, until its server has answered", "s", answered[1:])
    note = "from the sandbox's death to its going on"
    yield figure("restore of a warm checkpoint", "s", restored, "<= 80 ms", note=note)


def freeze_rows(quick: bool) -> Iterator[Row]:
    frozen, total, decided = [], [], []
    with own_home() as home, open_host(home) as host:
        box = serving(host)
        box.checkpoint(full=True)
        for number in range(QUICK_TIMES if quick else TIMES):
            ask_server(box, number + 2)
            manifest = box.checkpoint(full=True)
            frozen.append(manifest.freeze_seconds)
            total.append(manifest.total_seconds)
            box.run("true")
            decided.append(box.end_turn().wait().decide_seconds)
    yield figure("freeze of a full checkpoint", "s", frozen, "<= 60 ms", note="shell and web server")
    yield figure("full checkpoint until it is safe", "s", total)
    yield figure("decision of a turn's class", "s", decided)


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
            seconds, note = _created(home, client, count), "from start to end of the command"
            yield figure("create, warm", "s", seconds, "<= 300 ms", note=note)
            seconds = _created(home, client, count, "--image", str(tarball))
            note = f"a tarball of {tarball.stat().st_size / 1e6:.0f} MB that is known"
            yield figure("create --image of an unchanged tarball", "s", seconds, "<= 500 ms", note=note)


def loaded_rows(quick: bool) -> Iterator[Row]:
    count, cpus = QUICK_TIMES if quick else TIMES, os.cpu_count() or 1
    with own_home() as home, open_host(home) as host:
        box = host.create(SandboxSpec(new_name("held")))
        box.run(HELD, timeout=60)
        others = [host.create(SandboxSpec(new_name("busy"))) for _ in range(cpus)]
        for words in ("", f", {2 * cpus} busy loops on {cpus} CPUs"):
            totals, frozen, back = [], [], []
            for _ in range(count + 1):
                begin = time.monotonic()
                manifest = box.checkpoint(full=True)
                totals.append(time.monotonic() - begin)
                frozen.append(manifest.freeze_seconds)
                back.append(box.restore(manifest.id).seconds)
            yield figure(f"full checkpoint of 33 MiB{words}", "s", totals[1:], note="until it is safe")
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
        errors = process.stderr.read().decode(errors="replace").strip()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SandboxError(f"'sandbox {' '.join(words)}' ended with {process.returncode}: {errors}")
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
    with open_host(home) as host, contextlib.ExitStack() as closing:
        pool, name = host.context.pool, new_name("image")
        pool.create(name, pool.import_image("host"))
        closing.callback(pool.drop_box, name)
        root = pool.mount(name)
        closing.callback(pool.unmount, name)
        with (root / "zeros").open("wb") as file:
            file.truncate(zeros)
        subprocess.run(["tar", "-C", str(root), "-cf", str(path), "."], check=True, timeout=300)
    return path
