"""What switch, server and workers say to each other: datagrams of two sizes, little-endian, over IPv4.

A job's token is 64 bits drawn by its first worker and known to its processes alone; what does not bear it, or
does not come from where its sender joined from, is counted and forgotten. Who can read the wire can forge.
"""

from __future__ import annotations

import socket
from typing import Any

import numpy as np

from windtunnel.base.compiled import jit
from windtunnel.base.errors import UserError
from windtunnel.network.aggregation.policy.fixed import VALUES

MAGIC = 0x31415457
GRADIENT, RESENT, FLUSHED, RESULT, REMINDER, KNOWN = range(6)
"""Of fragments: from a worker; again, past the switch; a partial or whole sum on its way to the server; the
whole sum, or a question, to the workers in ``to``; the server has what the switch told all workers."""
JOIN, JOINED, REFUSED, LEAVE, OPEN, OPENED = range(16, 22)
"""Of jobs: a worker joins (``to``: how many there are, ``sequence``: its window) and leaves; the switch opens
the job at the server."""
SUMS, MOST, FLOATS = range(3)
"""How fragments are added: saturating int32, maxima, and float32, which only the server adds."""
SATURATED, DIRECT = 1, 2
"""Flags: of a sum; of a job whose results come from the switch."""
MOST_JOBS, MOST_WINDOW = 16, 256
_HEAD = [
    ("magic", "u4"), ("kind", "u1"), ("op", "u1"), ("flags", "u1"), ("priority", "u1"), ("token", "u8"),
    ("sequence", "i8"), ("bits", "u4"), ("to", "u4"), ("job", "u4"), ("pad", "u4"),
]  # fmt: skip
HEAD = np.dtype(_HEAD)  # type: ignore[arg-type]
_DATA: Any = [*_HEAD, ("values", "i4", (VALUES,)), ("floats", "f4", (VALUES,))]
_PLACES = [HEAD.fields[name][1] for name, _ in _HEAD] + [HEAD.itemsize] * 2  # type: ignore[index]
PACKET = np.dtype({
    "names": [field[0] for field in _DATA],
    "formats": [field[1:] if len(field) > 2 else field[1] for field in _DATA], "offsets": _PLACES,
    "itemsize": HEAD.itemsize + 4 * VALUES,
})  # fmt: skip
"""``floats`` is the memory of ``values``."""
SHORT, LONG = HEAD.itemsize, PACKET.itemsize
Packet = Any


@jit
def head(
    out: Packet, kind: int, op: int, flags: int, priority: int, token: int, sequence: int, bits: int,
    to: int, job: int,
) -> None:  # fmt: skip
    """Fill a packet's head."""
    out.magic, out.kind, out.op, out.flags, out.priority = MAGIC, kind, op, flags, priority
    out.token, out.sequence, out.bits, out.to, out.job = token, sequence, bits, to, job


def control(
    kind: int, token: int, *, sequence: int = 0, bits: int = 0, to: int = 0, job: int = 0, flags: int = 0
) -> bytes:
    """A datagram that is not about fragments."""
    return np.array([(MAGIC, kind, 0, flags, 0, token, sequence, bits, to, job, 0)], HEAD).tobytes()


def address(text: str, who: str) -> tuple[str, int]:
    """The host and port of "host:port".

    Raises:
        UserError: it is not that.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise UserError(f"{who}: address {text!r} is none, accepted is such as 10.0.0.9:7000")
    try:
        return socket.gethostbyname(host), int(port)
    except (OSError, UnicodeError) as error:
        raise UserError(f"{who}: address {text!r} has a host that is not known ({error})") from None
