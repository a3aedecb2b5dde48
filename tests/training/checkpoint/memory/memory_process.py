"""A memory service in a process of its own, to be killed: ``python memory_process.py FOLDER``.

Prints its address and path; each line of its input is a membership (JSON, with its place).
"""

import json
import sys
from pathlib import Path

from support.secret import KEYS
from windtunnel.training.checkpoint.live.memory import Limits, MemoryService
from windtunnel.training.elastic.model import Membership


class Context:
    def post(self, key: str, rank: int, value: object) -> None: ...

    def event(self, kind: str, **fields: object) -> None: ...


if __name__ == "__main__":
    limits = Limits(silence=5.0, membership=5.0, slot=0.3)
    service = MemoryService(Path(sys.argv[1]), "127.0.0.1", keys=KEYS, context=Context(), limits=limits)
    print(json.dumps([service.address, service.path]), flush=True)
    for line in sys.stdin:
        place, membership = json.loads(line)
        service.membership(Membership.of(membership), place)
        print("ok", flush=True)
