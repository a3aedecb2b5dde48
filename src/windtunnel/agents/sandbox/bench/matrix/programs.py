"""Rows of programs that nobody here wrote, those that agents use most first."""

from __future__ import annotations

from windtunnel.agents.sandbox.bench.matrix.row import MatrixRow

PROGRAMS: tuple[MatrixRow, ...] = (
    MatrixRow(
        "bash with a background job, traps and variables",
        "program",
        "variables, directory, trap and job table are as they were; the job ends with its own status",
        setup="""
            mkdir -p /workspace/a && cd /workspace/a
            declare -A map=([k]=v)
            trap 'echo trapped' USR1
            (while [ ! -e /row/stop ]; do sleep 0.1; done; exit 7) &
        """,
        check="""
            test "${map[k]}" = v && test "$PWD" = /workspace/a && jobs -r | grep -q row/stop &&
            trap -p USR1 | grep -q trapped
        """,
        go_on="touch /row/stop",
        end="wait %1; test $? = 7",
    ),
    MatrixRow(
        "Python http.server with an open connection",
        "program",
        "the same connection answers a second request, and new ones are served",
        files=("served.py", "keepalive.py"),
        setup="echo hello > /workspace/a.txt",
        start="""
            python3 /row/keepalive.py 8000 /a.txt >/row/client &
            exec python3 /row/served.py 8000 /workspace
        """,
        ready="grep -q 'first 200' /row/client",
        check="curl -sf http://127.0.0.1:8000/a.txt | grep -q hello && pgrep -f keepalive.py",
        go_on="touch /row/again; for n in $(seq 100); do grep -q again /row/client && break; sleep 0.1; done",
        end="cat /row/client; grep -q 'again 200' /row/client",
        by_command=True,
    ),
)
