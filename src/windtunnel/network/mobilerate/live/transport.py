"""Datagrams over UDP at the rate of a policy, acknowledged one by one; and TCP of this kernel beside them.

A datagram begins with its number and when it was sent; its acknowledgement says both again, and how many have
been received. What is lost stays lost: that is for who sends. Every interval the policy decides; one that
came late is made up for, with the acknowledgements that it had, and how late it was is noted.

`main` is what runs in the two networks: ``send`` or ``receive``, or either for TCP.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from windtunnel.network.mobilerate.live.relay import hurry
from windtunnel.network.mobilerate.policy import POLICIES, Ack, Observation, RateHistory, RateSettings
from windtunnel.store.eventlog import EventLog

CAPABILITY = "network.mobilerate"
HEAD, ACK = struct.Struct("<qd"), struct.Struct("<qdq")
HEADERS = 28
"""Bytes of IP and UDP."""
RECENT = 4096
"""Packets among which a receiver looks for one that it has got."""
CATCHES_UP = 1e-3
"""Seconds of pacing that one who was woken late makes up for."""
LOGGED = 0.1
"""Seconds between decisions that are logged: each holds its window."""
CONTROLS = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
KNOWN = RateSettings()
_CONGESTION, _PORT = 13, 7700


def send(
    plug: socket.socket, policy: str, seconds: float, *, settings: RateSettings = KNOWN,
    log: EventLog | None = None, source: Callable[[int], bytes] = bytes,
) -> list[float]:  # fmt: skip
    """Send what ``source`` gives, of so many bytes, over a connected socket; how late each interval was."""
    decide, memory, late, waiting = POLICIES[policy], RateHistory(), list[float](), list[Ack]()
    plug.setblocking(False)
    room = settings.packet - HEADERS - HEAD.size
    begin, last, sent_at, gap, logged = time.monotonic(), -1, -1.0, 0.0, -LOGGED
    now = 0.0
    while now < seconds or len(late) * settings.delta < seconds:
        while (tick := len(late) * settings.delta) <= min(now, seconds):
            acks = tuple(ack for ack in waiting if ack.at <= tick)
            waiting = waiting[len(acks) :]
            observation = Observation(settings, acks, last, memory)
            decision = decide(observation)
            memory, gap = decision.memory, settings.packet / decision.rate
            late.append(now - tick)
            if log is not None and tick >= logged + LOGGED:
                log.decision(CAPABILITY, policy, observation, decision)
                log.append("effect", gap_ns=round(gap * 1e9))
                logged = tick
        while sent_at + gap <= min(now, seconds):
            last += 1
            sent_at = max(sent_at + gap, now - CATCHES_UP)
            with suppress(OSError):  # no room in the socket, or nobody there: as lost as on the way
                plug.send(HEAD.pack(last, now) + source(room))
        due = min(len(late) * settings.delta, sent_at + gap) - (time.monotonic() - begin)
        if select.select([plug], [], [], max(due, 0.0))[0]:
            waiting += _acknowledged(plug, begin, last)
        now = time.monotonic() - begin
    return late


def _acknowledged(plug: socket.socket, begin: float, last: int) -> list[Ack]:
    acks = []
    with suppress(OSError):
        while data := plug.recv(64):
            if len(data) == ACK.size:
                number, sent, received = ACK.unpack(data)
                now = time.monotonic() - begin
                if 0 <= number <= last and 0 <= sent <= now and 0 <= received <= last + 1:
                    acks.append(Ack(number, sent, now, received))
    return acks


def receive(plug: socket.socket) -> None:
    """Acknowledge all that comes, until the socket is shut. What comes twice is counted once; a new sender
    begins anew."""
    received, peer, recent_numbers = 0, None, set[int]()
    while True:
        data, sender = plug.recvfrom(65_536)
        if sender is None:
            return
        if len(data) < HEAD.size:
            continue
        if sender != peer:
            received, peer, recent_numbers = 0, sender, set()
        number, sent = HEAD.unpack_from(data)
        received += number not in recent_numbers
        recent_numbers.add(number)
        if len(recent_numbers) > 2 * RECENT:
            recent_numbers = {recent for recent in recent_numbers if recent > number - RECENT}
        with suppress(OSError):
            plug.sendto(ACK.pack(number, sent, received), sender)


def _send(address: str, policy: str, seconds: str, log: str = "") -> None:
    hurry()
    plug = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    plug.connect((address, _PORT))
    events = EventLog(Path(log)) if log else None
    print(json.dumps(send(plug, policy, float(seconds), log=events)), flush=True)


def _receive() -> None:
    hurry()
    plug = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    plug.bind(("", _PORT))
    print("ready", flush=True)
    receive(plug)


def _send_tcp(address: str, control: str, seconds: str, _: str = "") -> None:
    plug, data = socket.socket(), bytes(1 << 16)
    plug.setsockopt(socket.IPPROTO_TCP, _CONGESTION, control.encode())
    end = time.monotonic() + float(seconds)
    plug.settimeout(float(seconds))
    with suppress(TimeoutError):
        plug.connect((address, _PORT))
        while (left := end - time.monotonic()) > 0:
            plug.settimeout(left)
            plug.send(data)
    print("[]", flush=True)


def _receive_tcp() -> None:
    server = socket.create_server(("", _PORT))
    print("ready", flush=True)
    plug, _ = server.accept()
    room = bytearray(1 << 16)
    while plug.recv_into(room):
        pass


def main() -> None:
    programs: dict[str, Callable[..., None]] = {
        "send": _send, "receive": _receive, "send-tcp": _send_tcp, "receive-tcp": _receive_tcp,
    }  # fmt: skip
    programs[sys.argv[1]](*sys.argv[2:])
