"""A model proxy of one sandbox as a daemon, for tests of what outlives it.

    kept_proxy.py HOME PORT UPSTREAM

It writes its process id into ``HOME/began``. The checkpoints of its first life never end; those of later ones
are done at once. On SIGTERM it closes the model proxy and ends with status 1.
"""

import os
import signal
import socket
import sys
import threading
from pathlib import Path

from fake_turns import FakeBox

from windtunnel.agents.sandbox.kept import Kept
from windtunnel.agents.sandbox.place import Home
from windtunnel.agents.sandbox.proxy import Bounds, ModelProxy
from windtunnel.agents.sandbox.proxy.lasting import Lasting

NAME = "listen.1.one"


def main() -> None:
    home, port, upstream = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    with (home / "began").open("a") as began:
        began.write(f"{os.getpid()}\n")
    lives = len((home / "began").read_text().split())
    kept = Kept(home, supervised=True)
    found = kept.take(NAME)
    if found:
        listener = socket.socket(fileno=found[0])
    else:
        listener = socket.create_server(("127.0.0.1", port))
        kept.keep(NAME, listener.fileno())
    proxy = ModelProxy(Home(home), bounds=Bounds(ending=0.5), trust_env=False)
    box = FakeBox("one", instant=lives > 1)
    proxy.serve(box, upstream, listener=listener, lasting=Lasting(kept, "1.one"))
    kept.settle()
    kept.ready()
    (home / f"ready{lives}").touch()
    while not ended.wait(0.05):
        pass
    proxy.close()
    os._exit(1)


if __name__ == "__main__":
    main()
