"""How long a fork, a restore and the freeze of a checkpoint take: one sandbox with a shell and a web server.

Medians of twenty. Between two checkpoints the server is asked once, so that it has memory to save. A fork
counts until ``fork`` returns, which is when it takes commands; and a second time until its server has
answered. Published: forks in 88 ms on average by the authors of Crab (arXiv 2604.28138), on 32 CPUs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

from windtunnel.agents.sandbox.bench.harness import new_name, opened, own_home
from windtunnel.agents.sandbox.bench.sessions import Seat
from windtunnel.agents.sandbox.errors import SandboxError
from windtunnel.agents.sandbox.live.box import Box
from windtunnel.agents.sandbox.live.host import Host
from windtunnel.bench.measure import conditions, spread
from windtunnel.bench.rows import Row

TIMES, QUICK_TIMES = 20, 6
FORK, FREEZE = 0.088, 0.060
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
    times, busy = QUICK_TIMES if quick else TIMES, conditions()
    with own_home() as home, opened(home) as host:
        box = serving(host)
        checkpoint = box.checkpoint(full=True).id
        for lazy in (False, True):
            ready, answered = [], []
            for number in range(times + 1):
                begin = time.monotonic()
                (fork,) = host.fork(checkpoint, lazy=lazy)
                forked = time.monotonic()
                asked(fork, 2)
                done = time.monotonic()
                host.remove(fork.name)
                if number:
                    ready.append(forked - begin)
                    answered.append(done - begin)
            words = ", lazy memory" if lazy else ""
            middle = statistics.median(ready)
            yield Row(
                "fork",
                f"fork of a warm checkpoint{words}",
                "s",
                measured=middle,
                published=None if lazy else FORK,
                source="" if lazy else "arXiv 2604.28138, the mean",
                target="" if lazy else "<= 88 ms",
                met=None if lazy else middle <= FORK,
                note=f"median of {times}; {_around(ready)}; {busy}",
            )
            yield Row(
                "fork",
                f"fork{words}, until its server has answered",
                "s",
                measured=statistics.median(answered),
            )
        seconds = []
        for _ in range(times):
            seconds.append(box.restore(checkpoint).seconds)
            asked(box, 2)
        yield Row(
            "fork",
            "restore of a warm checkpoint",
            "s",
            measured=statistics.median(seconds),
            note=f"median of {times}, from the sandbox's death to its going on; {_around(seconds)}",
        )


def freeze_rows(quick: bool) -> Iterator[Row]:
    times, busy = QUICK_TIMES if quick else TIMES, conditions()
    frozen, total, decided = [], [], []
    with own_home() as home, opened(home) as host:
        box = serving(host)
        box.checkpoint(full=True)
        for number in range(times):
            asked(box, number + 2)
            manifest = box.checkpoint(full=True)
            frozen.append(manifest.freeze_seconds)
            total.append(manifest.total_seconds)
            box.run("true")
            decided.append(box.end_turn().wait().decide_seconds)
    middle = statistics.median(frozen)
    yield Row(
        "freeze",
        "freeze of a full checkpoint",
        "s",
        measured=middle,
        target="<= 60 ms",
        met=middle <= FREEZE,
        note=f"shell and web server, median of {times}; {_around(frozen)}; {busy}",
    )
    yield Row(
        "freeze",
        "full checkpoint until it is safe",
        "s",
        measured=statistics.median(total),
        note=_around(total),
    )
    yield Row(
        "freeze",
        "decision of a turn's class",
        "s",
        measured=statistics.median(decided),
        note=_around(decided),
    )


def _around(seconds: list[float]) -> str:
    return f"least {min(seconds) * 1e3:.1f} ms, 95th percentile {spread(seconds).p95 * 1e3:.1f} ms"
