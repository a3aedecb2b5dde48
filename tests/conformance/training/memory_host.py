"""One host's memory service in a process of its own, for `hosts`: to be killed.

Arguments: its folder, and the file with the secret. Says, a line of JSON each: its address and path, then
``["post", key, rank, value]`` for what it posts. Each line that it is told is ``["membership", plain,
place]`` or ``["decided", key, values]``.
"""

import json
import sys
import threading
from pathlib import Path
from typing import Any

from windtunnel.base.keys import Keys
from windtunnel.training.checkpoint.live.memory import MemoryLimits, MemoryService
from windtunnel.training.elastic.model import Membership


class Context:
    """The agent around it, as far as the service needs one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def post(self, key: str, rank: int, value: Any) -> None:
        self.say(["post", key, rank, value])

    def event(self, kind: str, **fields: Any) -> None: ...

    def say(self, message: list[Any]) -> None:
        with self._lock:
            print(json.dumps(message), flush=True)


def main() -> None:
    """Serve until the end of the input."""
    context, keys = Context(), Keys.read(Path(sys.argv[2]))
    limits = MemoryLimits(connect=1.0, silence=10.0, slot=0.3, pause=0.05)
    service = MemoryService(Path(sys.argv[1]), "127.0.0.1", keys=keys, context=context, limits=limits)
    context.say([service.address, service.path])
    for line in sys.stdin:
        op, first, second = json.loads(line)
        if op == "membership":
            service.membership(Membership.of(first), second)
            context.say(["ready"])
        else:
            service.decided(first, {int(rank): value for rank, value in second.items()})
    service.close()


if __name__ == "__main__":
    main()
