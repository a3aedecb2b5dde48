"""A daemon for tests of the watchdog: it keeps a listening socket and answers there.

    kept_service.py PORT HOME [die | fail]

It writes its process id into ``HOME/began``, waits while ``HOME/hold`` is there, and is ready then.
``die``: and kills itself. ``fail``: it ends with status 7 before it is ready.
"""

import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

from windtunnel.agents.sandbox.kept import Kept

NAME = "listen.1.a"


def main() -> None:
    port, home, words = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    address = os.environ["NOTIFY_SOCKET"][1:]
    with (home / "began").open("a") as began:
        began.write(f"{os.getpid()}\n")
    if words == ["fail"]:
        sys.exit(7)
    while (home / "hold").exists():
        time.sleep(0.01)
    kept = Kept(home, supervised=True)
    found = kept.take(NAME)
    if found:
        listener = socket.socket(fileno=found[0])
    else:
        listener = socket.create_server(("127.0.0.1", port))
        kept.keep(NAME, listener.fileno())
    listener.setblocking(True)
    kept.ready()
    (home / "ready").touch()
    if words == ["die"]:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    while True:
        # a signal that comes just before the wait is handled after it, so that it must not be for ever
        if not select.select([listener], [], [], 0.2)[0]:
            continue
        plug, _ = listener.accept()
        with plug:
            asked = plug.recv(100).strip()
            plug.sendall({b"pid": str(os.getpid()), b"address": address}[asked].encode())


if __name__ == "__main__":
    main()
