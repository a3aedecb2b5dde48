"""Locks of every kind, and timers of every clock and form, are there after a restore, and go on."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.waiting import until
from windtunnel.linux import processes

pytestmark = pytest.mark.root

# a database whose shared index is mapped and locked, and a child that has copies of all descriptors
DATABASE = """
import os, signal, sqlite3, time
db = sqlite3.connect('/workspace/db', isolation_level=None)
db.execute('pragma journal_mode=wal'); db.execute('create table t(x)'); db.execute('insert into t values (1)')
if os.fork() == 0:
    while True: signal.pause()
def insert(*_):
    db.execute('insert into t values (3)'); open('/workspace/inserted', 'w').close()
signal.signal(signal.SIGUSR1, insert)
open('/workspace/ready', 'w').close()
while True: signal.pause()
"""
LOCKS = """
import ctypes, fcntl, mmap, os, signal, struct
libc = ctypes.CDLL(None); shared = libc.shmget(0, 4096, 0o1600)  # memory that goes with its last user
libc.shmat.restype = ctypes.c_void_p; assert libc.shmat(shared, None, 0) != ctypes.c_void_p(-1).value
assert libc.shmctl(shared, 0, None) == 0
def lock(fd, command, kind, start, length):
    fcntl.fcntl(fd, command, struct.pack('hhqqi', kind, 0, start, length, 0))
a = os.open('/workspace/locked', os.O_RDWR | os.O_CREAT); os.write(a, b'x' * 8192)
m = mmap.mmap(a, 8192)
lock(a, 6, fcntl.F_WRLCK, 0, 10); lock(a, 6, fcntl.F_RDLCK, 100, 10)
b = os.open('/workspace/locked', os.O_RDWR); lock(b, 37, fcntl.F_WRLCK, 200, 0)
c = os.open('/workspace/flocked', os.O_RDWR | os.O_CREAT); fcntl.flock(c, fcntl.LOCK_EX)
if os.fork() == 0:
    lock(a, 6, fcntl.F_WRLCK, 120, 10); lock(a, 6, fcntl.F_RDLCK, 100, 10)
    os.open('/workspace/locked', os.O_RDONLY); open('/workspace/ready', 'w').close()
    os.kill(os.getpid(), signal.SIGSTOP)  # one that stands has to lock, too
while True: signal.pause()
"""
# each clock and form of timer, all of them faster than a dump; what has expired is counted and told
TIMERS = """
import ctypes, os, select, signal, time
libc = ctypes.CDLL(None, use_errno=True)
def spec(first, every):
    return (ctypes.c_long * 4)(int(every), int(every % 1 * 1e9), int(first), int(first % 1 * 1e9))
def timer(clock, first, every, flags=0):
    fd = libc.timerfd_create(clock, os.O_NONBLOCK)
    assert libc.timerfd_settime(fd, flags, spec(first, every), None) == 0
    return fd
names = {timer(1, .01, .01): 'monotonic', timer(0, .01, .01): 'real', timer(7, .01, .01): 'boot',
         timer(0, time.time() + .01, .01, 1): 'absolute', timer(1, time.monotonic() + 1000, 0, 1): 'far'}
spent = timer(1, time.monotonic() + .001, 0, 1); select.select([spent], [], []); os.read(spent, 8)
names[spent] = 'spent'
counts = dict.fromkeys([*names.values(), 'itimer', 'posix'], 0)
def tick(number, _): counts['itimer' if number == signal.SIGALRM else 'posix'] += 1
signal.signal(signal.SIGALRM, tick); signal.setitimer(signal.ITIMER_REAL, .01, .01)
signal.signal(signal.SIGUSR2, tick)
event = (ctypes.c_int * 16)(0, 0, signal.SIGUSR2, 0); alarm = ctypes.c_void_p()
assert libc.timer_create(1, event, ctypes.byref(alarm)) == 0
assert libc.timer_settime(alarm, 0, spec(.01, .01), None) == 0
def tell(*_):
    with open('/workspace/told', 'w') as f: f.write(repr(counts))
    os.rename('/workspace/told', '/workspace/seen')
signal.signal(signal.SIGUSR1, tell)
open('/workspace/ready', 'w').close()
poll = select.epoll()
for fd in names: poll.register(fd, select.EPOLLIN)
while True:
    for fd, _ in poll.poll():
        try: counts[names[fd]] += int.from_bytes(os.read(fd, 8), 'little')
        except BlockingIOError: pass
"""
STILL = ("far", "spent")
"""Timers that do not expire (any more)."""
NEXT_CLIENT = """python3 -c "
import sqlite3; db = sqlite3.connect('/workspace/db', isolation_level=None)
db.execute('insert into t values (2)')"
kill -USR1 $database; until [ -e /workspace/inserted ]; do sleep 0.01; done
python3 -c "import sqlite3; print(sqlite3.connect('/workspace/db').execute('select x from t').fetchall())" """


def start(box: Any, name: str, program: str) -> None:
    box.run(
        f"cat > /workspace/{name}.py <<'END'\n{program}\nEND\n"
        f"python3 /workspace/{name}.py </dev/null >/workspace/{name}.out 2>&1 & {name}=$!\n"
        "until [ -e /workspace/ready ]; do sleep 0.01; done; rm /workspace/ready",
        timeout=60,
    )


def held(box: Any) -> set[tuple[str, ...]]:
    """The locks of a sandbox's processes, as the kernel has them."""
    inside = {str(pid): str(processes.inner_pid(pid)) for pid in box.machine().cgroup.pids()}
    files = {
        str(Path(f"/proc/{pid}/root/workspace/{name}").stat().st_ino)
        for pid in list(inside)[:1]
        for name in ("locked", "flocked", "db", "db-wal", "db-shm")
    }
    locks = set()
    for line in Path("/proc/locks").read_text().splitlines():
        if " -> " in line:  # it waits for a lock
            continue
        _, kind, _, mode, pid, where, first, last = line.split()
        if pid in inside or (pid == "-1" and where.rpartition(":")[2] in files):
            locks.add((kind, mode, inside.get(pid, "file"), where.rpartition(":")[2], first, last))
    return locks


def expirations(box: Any) -> dict[str, int]:
    reply = box.run(
        "kill -USR1 $timers; until [ -e /workspace/seen ]; do sleep 0.01; done; "
        "cat /workspace/seen; rm /workspace/seen",
        timeout=60,
    )
    counts: dict[str, int] = ast.literal_eval(reply.text)
    return counts


@pytest.mark.root
def test_locks_and_timers_are_there_after_every_restore(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    box = make()
    start(box, "database", DATABASE)
    start(box, "locks", LOCKS)
    start(box, "timers", TIMERS)
    before = held(box)
    assert {kind for kind, *_ in before} == {"POSIX", "OFDLCK", "FLOCK"}
    assert len({pid for kind, _, pid, *_ in before if kind == "POSIX"}) == 3
    point = box.checkpoint(allow_less=True).id
    for _ in range(2):
        box.machine().cgroup.kill()
        report = box.restore(point, allow_less=True)
        # they are held, but a program may lose them by the device number
        assert all("POSIX lock" in lack.what and "SQLite" in lack.why for lack in report.lacks), report.lacks
        assert held(box) == before
        first = expirations(box)
        until(
            lambda first=first: all(
                now > first[name] for name, now in expirations(box).items() if name not in STILL
            )
        )
        assert {name: expirations(box)[name] for name in STILL} == dict.fromkeys(STILL, 0)
    assert box.run(NEXT_CLIENT, timeout=60).stdout == b"[(1,), (2,), (3,)]\n"
    assert box.run("cat /workspace/*.out").stdout == b""

    # as CRIU alone brings it back: every loss is told, with whose it is
    monkeypatch.setattr("windtunnel.agents.sandbox.inventory.mend.mend", lambda *_: None)
    lacks = box.restore(point, allow_less=True).lacks
    assert {lack.kind for lack in lacks} == {"ipc", "locks", "timers"}
    words = "\n".join(map(str, lacks))
    assert "python3 /workspace/database.py" in words
    assert "shared POSIX lock on descriptor" in words
    assert words.count("periodic timerfd") >= 3
    assert words.count(": it does not go on") >= 3
