"""Shares in this kernel: hosts in namespaces on a bridge, real TCP, a line of 200 Mb/s; five rounds.

The line is the bridge's port to the receiver: a token bucket there (FIFO), HTB with a class for each sender,
or the token bucket behind the gap. Senders and receiver are processes of ours; goodput is what the receiver
reads.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from benchmarks.harness.measure import in_turn, spread
from benchmarks.harness.rows import Row, figure, need
from benchmarks.network import traffic
from benchmarks.network.traffic import BULK, DATAGRAM, line, told
from windtunnel.linux import network, queues
from windtunnel.network.sharing.policy import SHARE

LINE = 25e6
PAYLOAD = 1448 / 1514
"""Of what is on the wire, what TCP's receiver reads, at most."""
UDP = 22.5e6
"""Bytes/s on the wire of a flow of UDP."""


@dataclass(frozen=True)
class Sends:
    """So many flows of a congestion control, or one of UDP of 180 Mb/s."""

    kind: str
    count: int
    weight: float = 1.0
    feedback: str = "drop"


SCENARIOS: dict[str, tuple[Sends, Sends]] = {
    "1 CUBIC against 16": (Sends("cubic", 1), Sends("cubic", 16)),
    "1 reno against 32": (Sends("reno", 1), Sends("reno", 32)),
    "4 CUBIC against UDP": (Sends("cubic", 4), Sends("udp", 1)),
    "4 CUBIC against 4 BBR": (Sends("cubic", 4), Sends("bbr", 4)),
    "3 BBR to 1 CUBIC, 4 flows each": (Sends("bbr", 4, 3.0), Sends("cubic", 4)),
}
MARKED = (Sends("reno", 2, feedback="ecn"), Sends("cubic", 8))
IDLE = (Sends("cubic", 4), Sends("cubic", 0))


def kernel_rows(quick: bool) -> Iterator[Row]:
    """Every scenario under every arm."""
    need(network.missing())
    repeats, span = (1, 1.5) if quick else (5, 3.0)
    for name, senders in list(SCENARIOS.items())[: 2 if quick else None]:
        arms = {arm: partial(_round, senders, arm, span) for arm in ("gap", "fifo", "htb")}
        for arm, found in in_turn(arms, repeats).items():
            own = _own(senders, SHARE if arm == "gap" else 1.0)
            off = spread(
                max(abs(got - rate) / rate for got, rate in zip(one, own, strict=True)) for one in found
            )
            goal, note = "<= 5%" if arm == "gap" else "", f"{_told(found)}; worst round {off.p95:.1%}"
            yield figure(f"{name}, {arm}: share error", "", off.median, goal, note=note)
    arms = {arm: partial(_round, IDLE, arm, span) for arm in ("gap", "lent", "fifo", "htb")}
    for arm, found in in_turn(arms, repeats).items():
        used = spread(one[0] / (LINE * PAYLOAD) for one in found).median
        goal = ">= 97%" if arm == "lent" else ""
        yield figure(f"idle neighbour, {arm}: of the line", "", used, goal, note=_told(found))
    marked = [_round(MARKED, "gap", span) for _ in range(repeats)]
    used = spread(one[0] / _own(MARKED, SHARE)[0] for one in marked).median
    yield figure("reno that is marked: of its rate", "", used, note=_told(marked))


def _own(senders: Sequence[Sends], share: float) -> list[float]:
    """Goodput that each would have at exactly its weight's part of so much of the line."""
    weights = sum(one.weight for one in senders)
    size = [DATAGRAM / (DATAGRAM + 42) if one.kind == "udp" else PAYLOAD for one in senders]
    return [share * LINE * one.weight / weights * part for one, part in zip(senders, size, strict=True)]


def _told(found: Sequence[Sequence[float]]) -> str:
    return " / ".join(f"{spread(one[k] for one in found).median * 8e-6:.1f}" for k in range(2)) + " Mb/s"


def _round(senders: Sequence[Sends], arm: str, span: float) -> list[float]:
    """Goodput of each sender, bytes/s, in a network that is made for it and goes with it."""
    net = network.Network(f"bench-{os.getpid() % 10**6}")
    with ExitStack() as stack:
        stack.callback(net.close)
        hosts = [net.add(name) for name in ("one", "two", "receiver")]
        port, (there, address) = net.port("receiver"), hosts[2]
        _put(arm, port, senders, [host[1] for host in hosts[:2]], stack)
        receiver = stack.enter_context(traffic.started(there, "receive", ",".join(map(str, BULK))))
        line(receiver)
        for one, (place, _), number in zip(senders, hosts, BULK, strict=False):
            if one.count:
                words = ["send", address, number, one.kind, one.count, UDP]
                line(stack.enter_context(traffic.started(place, *words)))
        time.sleep(1.0)
        began, before = told(receiver)
        time.sleep(span)
        ended, after = told(receiver)
        return [(late - early) / (ended - began) for early, late in zip(before, after, strict=True)]


def _put(arm: str, port: str, senders: Sequence[Sends], addresses: Sequence[str], stack: ExitStack) -> None:
    """What stands before the line, and the line."""
    if arm == "htb":
        own = [LINE * one.weight / sum(other.weight for other in senders) for one in senders]
        queues.make_classes(port, LINE, own, LINE)
        for number, address in enumerate(addresses, 2):
            queues.classify(port, address, number)
        return
    network.set_rate(port, LINE)
    if arm != "fifo":
        entities = {
            f"e{number}": {"match": address, "weight": one.weight, "feedback": one.feedback}
            for number, (one, address) in enumerate(zip(senders, addresses, strict=True))
        }
        stack.enter_context(traffic.shared(port, LINE, entities, lent=arm == "lent"))
