"""Which hosts do not answer this one: a connection is tried to the memory service of each, no word is said.

A refusal is an answer, and the kernel accepts for a process that stands still; so silence is the network's
or the whole host's. An error of this host's own (no descriptor, no port left) says nothing about another.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from windtunnel.base import wire

AT_ONCE = 32
_NO_WAY = {
    errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN, errno.ETIMEDOUT,
    errno.EINVAL, errno.EACCES,  # routes of the kinds blackhole and prohibit
}  # fmt: skip


def silent(hosts: Mapping[int, str], within: float) -> list[int]:
    """Those of ``hosts`` ("host:port" each, "" where there is no service) of which nothing comes ``within``
    seconds."""
    reachable = [host for host, address in hosts.items() if address]
    if not reachable:
        return []
    with ThreadPoolExecutor(min(AT_ONCE, len(reachable)), thread_name_prefix="windtunnel-reach") as pool:
        answers = pool.map(lambda host: _answers(hosts[host], within), reachable)
        return sorted(host for host, there in zip(reachable, answers, strict=True) if not there)


def _answers(address: str, within: float) -> bool:
    try:
        wire.connect(address, within).close()
    except TimeoutError:
        return False
    except OSError as error:
        return error.errno not in _NO_WAY
    return True
