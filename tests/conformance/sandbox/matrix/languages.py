"""Rows of language runtimes: what a program keeps in its memory, its threads and its other processes."""

from __future__ import annotations

from conformance.sandbox.matrix.row import MatrixRow

_GROWS = """
    count() { grep -o '[0-9]*$' /row/out | tail -n 1; }
    old=$(count); for n in $(seq 100); do test $(count) -gt $old && break; sleep 0.1; done"""
"""The number at the end of the output is soon greater than it was."""
_UNTIL_ENDED = "for n in $(seq 600); do grep -q ended /row/out && break; sleep 0.1; done"

LANGUAGES: tuple[MatrixRow, ...] = (
    MatrixRow(
        "Python with threads",
        "program",
        "every thread goes on, locks and conditions hold, and no count is lost",
        files=("threads.py",),
        start="exec python3 /row/threads.py",
        ready="test $(tail -n 1 /row/out) -gt 20",
        check=f"{_GROWS}; test $(ls /proc/$(pgrep -f threads.py)/task | wc -l) = 6 && test $(count) -gt $old",
        go_on=f"touch /row/go; {_UNTIL_ENDED}",
        end="tail -n 3 /row/out; grep -q 'ended well' /row/out",
    ),
    MatrixRow(
        "Python multiprocessing: Pool, Queue, Value, Lock",
        "program",
        "the pool's answers come in order, the queue loses nothing, the shared counter is exact",
        files=("pool.py",),
        start="exec python3 /row/pool.py",
        ready="test $(grep -c answer /row/out) -gt 20",
        check=f"{_GROWS}; test $(count) -gt $old && test $(pgrep -f pool.py | wc -l) -ge 6",
        go_on=f"touch /row/go; {_UNTIL_ENDED}",
        end="tail -n 3 /row/out; grep -q 'ended well' /row/out",
    ),
    MatrixRow(
        "Python asyncio, a server and twenty clients",
        "program",
        "every connection's messages go on in order, timers fire, a subprocess is still awaited",
        files=("streams.py",),
        start="exec python3 /row/streams.py",
        ready="test $(tail -n 1 /row/out) -gt 40",
        check=f"{_GROWS}; test $(count) -gt $old",
        go_on=f"touch /row/go; {_UNTIL_ENDED}",
        end="tail -n 3 /row/out; grep -q 'ended well' /row/out",
    ),
    MatrixRow(
        "Python with a TCP connection to the outside",
        "program",
        "the connection is closed after a restore and in forks, never half there; another one goes on",
        files=("caller.py",),
        outside=True,
        start="exec python3 /row/caller.py",
        ready="test $(grep -o '[0-9]*$' /row/out | tail -n 1) -gt 20",
        check=f"{_GROWS}; test $(count) -gt $old && tail -n 3 /row/out",
        go_on=f"touch /row/go; {_UNTIL_ENDED.replace('ended', 'well')}",
        end="grep -v '^[0-9]*$' /row/out | tail -n 3; grep -q 'ended well' /row/out",
    ),
    MatrixRow(
        "node with timers and worker threads",
        "program",
        "state, timers and workers that share memory go on; the same server answers",
        packages=("nodejs",),
        files=("server.js",),
        start="exec node /row/server.js",
        ready="curl -sf http://127.0.0.1:3000/ticks | grep -E '^([5-9]|[0-9]{2,}) ([5-9]|[0-9]{2,})'",
        check="""
            was=($(curl -sf http://127.0.0.1:3000/ticks)) && test "${was[2]}" = kept && sleep 0.5 &&
            now=($(curl -sf http://127.0.0.1:3000/ticks)) &&
            test ${now[0]} -gt ${was[0]} && test ${now[1]} -gt ${was[1]}
        """,
        go_on="curl -sf http://127.0.0.1:3000/work",
        end="test \"$(curl -sf http://127.0.0.1:3000/work)\" = 'worked 2'",
    ),
    MatrixRow(
        "a JVM server",
        "program",
        "the server counts on from its memory, its threads run, and it collects garbage",
        packages=("openjdk-17-jre-headless", "bsh"),
        files=("Server.bsh",),
        start="exec java -Xmx128m -cp /usr/share/java/bsh.jar bsh.Interpreter /row/Server.bsh",
        ready="curl -sf http://127.0.0.1:8090/ && curl -sf http://127.0.0.1:8090/ | grep -E ' [1-9]'",
        check="""
            was=($(curl -sf http://127.0.0.1:8090/)) && sleep 0.5 &&
            now=($(curl -sf http://127.0.0.1:8090/)) &&
            test ${now[0]} = $((was[0] + 1)) && test ${now[0]} -ge 4 && test ${now[1]} -gt ${was[1]}
        """,
        go_on="curl -sf http://127.0.0.1:8090/gc",
        end="curl -sf http://127.0.0.1:8090/gc | grep collected",
        seconds=90.0,
    ),
    MatrixRow(
        "a Jupyter kernel and its client",
        "program",
        "a variable of an earlier cell is there, for the client that was connected and for a new one",
        packages=("libstdc++6",),
        distributions=("ipykernel", "jupyter_client"),
        files=("cells.py",),
        setup="export PYTHONPATH=$ROW_PYTHON JUPYTER_PLATFORM_DIRS=1",
        start="""
            python3 -m ipykernel_launcher -f /row/kernel.json &
            exec python3 /row/cells.py /row/kernel.json
        """,
        ready="grep -q 'first: 41' /row/out",
        check="python3 /row/cells.py /row/kernel.json 'print(x + 1)' | grep -x 42",
        go_on="touch /row/again; for n in $(seq 100); do grep -q again /row/out && break; sleep 0.1; done",
        end="tail -n 3 /row/out; grep -q 'again: 43' /row/out",
        seconds=90.0,
    ),
    MatrixRow(
        "torch, a training loop with several threads",
        "program",
        "the loss of every later step is to the bit what it is without a checkpoint",
        packages=("libstdc++6",),
        distributions=("torch", "numpy"),
        files=("training.py",),
        setup="export PYTHONPATH=$ROW_PYTHON",
        start="exec python3 /row/training.py",
        ready="grep -q 'step 5 ' /row/out",
        check="pgrep -f training.py && ! grep -q Error /row/out",
        go_on=f"touch /row/go; {_UNTIL_ENDED}",
        end="tail -n 3 /row/out; grep -q 'ended well' /row/out",
        seconds=120.0,
    ),
    MatrixRow(
        "torch DataLoader with workers and shared memory",
        "program",
        "every batch comes, in order and with its bytes, from the workers that there were",
        packages=("libstdc++6",),
        distributions=("torch", "numpy"),
        files=("loader.py",),
        setup="export PYTHONPATH=$ROW_PYTHON",
        start="exec python3 /row/loader.py",
        ready="grep -q 'batch 5$' /row/out",
        check="test $(pgrep -f loader.py | wc -l) -ge 3 && ! grep -q Error /row/out",
        go_on=f"touch /row/go; {_UNTIL_ENDED}",
        end="tail -n 3 /row/out; grep -q 'ended well' /row/out",
        seconds=120.0,
    ),
)
