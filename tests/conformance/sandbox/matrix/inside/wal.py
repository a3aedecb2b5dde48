"""Several processes on one SQLite database in WAL mode, which was opened before they were forked."""

import os
import sqlite3
import sys
import time

place = sys.argv[1]
first = sqlite3.connect(place, timeout=30, isolation_level=None)
first.execute("pragma journal_mode = wal")
first.execute("create table t (who int, n int)")


def wait(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.02)


def writer(who: int) -> None:
    """Writes rows one by one: fifty before the middle, and none after it."""
    own = sqlite3.connect(place, timeout=30, isolation_level=None)
    for n in range(50):
        own.execute("insert into t values (?, ?)", (who, n))
    open(f"/row/wrote{who}", "w").close()
    wait("/row/go")
    rows = own.execute("select count(*) from t where who = ?", (who,)).fetchone()[0]
    os._exit(0 if rows == 50 else 1)


children = []
for who in range(3):
    pid = os.fork()
    if not pid:
        writer(who)
    children.append(pid)
for who in range(3):
    wait(f"/row/wrote{who}")
first.execute("begin immediate")
for n in range(500):
    first.execute("insert into t values (99, ?)", (n,))
print("in the middle", flush=True)
wait("/row/go")
first.execute("commit")
ends = [os.waitpid(pid, 0)[1] for pid in children]
print("all ended well" if not any(ends) else f"ended with {ends}", flush=True)
