"""A memory service in a process of its own, to be killed: ``python memory_process.py FOLDER``.

It has place 0 of two in generation 1, prints its address, and serves until its input ends.
"""

from __future__ import annotations

import sys
from pathlib import Path

from support.secret import KEYS
from windtunnel.training.checkpoint.live.memory import MemoryLimits, MemoryService
from windtunnel.training.elastic.model import MemberHost, Membership


class Context:
    def post(self, key: str, rank: int, value: object) -> None: ...

    def event(self, kind: str, **fields: object) -> None: ...


if __name__ == "__main__":
    limits = MemoryLimits(silence=5.0, membership=5.0, slot=0.3)
    service = MemoryService(Path(sys.argv[1]), "127.0.0.1", keys=KEYS, context=Context(), limits=limits)
    hosts = (MemberHost(0, "127.0.0.1", service.address), MemberHost(1, "127.0.0.1", "127.0.0.1:1"))
    service.membership(Membership(1, 1, hosts, 1, "test"), 0)
    print(service.address, flush=True)
    sys.stdin.read()
