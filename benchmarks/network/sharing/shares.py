"""Shares in the packet engine: who sends how must make no difference. Emulated, five seeds each.

Shares in this kernel: hosts in namespaces on a bridge, real TCP, a line of 200 Mb/s; five rounds.

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
from statistics import median

from benchmarks.harness.measure import in_turn
from benchmarks.harness.rows import Row, figure, need
from benchmarks.network import traffic
from benchmarks.network.traffic import BULK, DATAGRAM, byte_counts, line
from windtunnel.linux import network, queues
from windtunnel.network.sharing.policy import SHARE, decide, fixed
from windtunnel.network.sharing.twin import SharedLink, SharingResult, TenantTraffic, emulate

ARMS = ("aq", "fifo", "policer", "drr", "csfq")
TENANTS: dict[str, tuple[TenantTraffic, ...]] = {
    "1 reno against 32": (TenantTraffic("one"), TenantTraffic("many", 32)),
    "UDP of 8 Gb/s against 8 reno": (TenantTraffic("udp", 1, "udp", sends=1e9), TenantTraffic("reno", 8)),
    "4 each of reno, CUBIC, DCTCP, Vegas": (
        TenantTraffic("reno", 4), TenantTraffic("cubic", 4, "cubic"),
        TenantTraffic("dctcp", 4, "dctcp", feedback="ecn"),
        TenantTraffic("vegas", 4, "vegas", feedback="delay"),
    ),
    "weights 3 to 1": (TenantTraffic("three", 4, weight=3.0), TenantTraffic("one", 16)),
    "caps of 6, 2 and 1 Gb/s": tuple(TenantTraffic(f"{cap}", 4, rate=cap * 1.25e8) for cap in (6, 2, 1)),
}  # fmt: skip
IDLE_TENANTS = (TenantTraffic("busy", 4), TenantTraffic("idle", stops=True))
WORLDS = {"20 us": SharedLink(), "100 us": SharedLink(rtt=100e-6)}


def error(result: SharingResult) -> float:
    """The largest part by which a tenant is off its own rate."""
    return max(abs(got - own) / own for got, own in zip(result.goodput, result.promised, strict=True))


def summary(results: Sequence[SharingResult]) -> str:
    """Median goodputs in Gb/s, and what the physical queue and drops were."""
    goods = " / ".join(
        f"{median(each) * 8e-9:.2f}" for each in zip(*(result.goodput for result in results), strict=True)
    )
    wait, dropped = (
        median(getattr(result, quantity) for result in results) for quantity in ("wait", "dropped")
    )
    return f"{goods} Gb/s; {wait * 1e6:.0f} us in the queue, {dropped:.1%} dropped"


def twin_rows(quick: bool) -> Iterator[Row]:
    """Every scenario under every arm, a round trip of 20 and one of 100 us on a line of 10 Gb/s."""
    seeds, seconds = (range(2), 0.2) if quick else (range(5), 0.5)
    for trip, world in list(WORLDS.items())[: 1 if quick else None]:
        for name, tenants in TENANTS.items():
            for arm in ARMS:
                results = [emulate(tenants, arm, seconds, seed, world) for seed in seeds]
                words, goal = f"{trip}: {name}, {arm}: share error", "<= 2%" if arm == "aq" else ""
                yield figure(words, "", goal=goal, emulated=map(error, results), note=summary(results))
    for name, policy in (("not lent", fixed), ("lent", decide)):
        results = [emulate(IDLE_TENANTS, "aq", seconds, seed, policy=policy) for seed in seeds]
        used, goal = [each.goodput[0] / SharedLink().line for each in results], ">= 97%" * (name == "lent")
        yield figure(
            f"idle neighbour, {name}: of the line", "", goal=goal, emulated=used, note=summary(results)
        )


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


SCENARIOS: dict[str, tuple[Sends, Sends]] = {
    "1 CUBIC against 16": (Sends("cubic", 1), Sends("cubic", 16)),
    "1 reno against 32": (Sends("reno", 1), Sends("reno", 32)),
    "4 CUBIC against UDP": (Sends("cubic", 4), Sends("udp", 1)),
    "4 CUBIC against 4 BBR": (Sends("cubic", 4), Sends("bbr", 4)),
    "3 BBR to 1 CUBIC, 4 flows each": (Sends("bbr", 4, 3.0), Sends("cubic", 4)),
}
IDLE = (Sends("cubic", 4), Sends("cubic", 0))


def kernel_rows(quick: bool) -> Iterator[Row]:
    """Every scenario under every arm."""
    need(network.missing())
    repeats, span = (1, 1.5) if quick else (5, 3.0)
    for name, senders in list(SCENARIOS.items())[: 2 if quick else None]:
        arms = {arm: partial(_round, senders, arm, span) for arm in ("gap", "fifo", "htb")}
        for arm, rounds in in_turn(arms, repeats).items():
            own = _own(senders, SHARE if arm == "gap" else 1.0)
            off = [
                max(abs(got - rate) / rate for got, rate in zip(goodputs, own, strict=True))
                for goodputs in rounds
            ]
            goal = "<= 5%" if arm == "gap" else ""
            yield figure(f"{name}, {arm}: share error", "", off, goal, note=_rates(rounds))
    arms = {arm: partial(_round, IDLE, arm, span) for arm in ("gap", "lent", "fifo", "htb")}
    for arm, rounds in in_turn(arms, repeats).items():
        used, goal = (
            [goodputs[0] / (LINE * PAYLOAD) for goodputs in rounds],
            ">= 97%" if arm == "lent" else "",
        )
        yield figure(f"idle neighbour, {arm}: of the line", "", used, goal, note=_rates(rounds))


def _own(senders: Sequence[Sends], share: float) -> list[float]:
    """Goodput that each would have at exactly its weight's part of so much of the line."""
    weights = sum(sender.weight for sender in senders)
    size = [DATAGRAM / (DATAGRAM + 42) if sender.kind == "udp" else PAYLOAD for sender in senders]
    return [share * LINE * sender.weight / weights * part for sender, part in zip(senders, size, strict=True)]


def _rates(rounds: Sequence[Sequence[float]]) -> str:
    return " / ".join(f"{median(each) * 8e-6:.1f}" for each in zip(*rounds, strict=True)) + " Mb/s"


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
        for sender, (place, _), number in zip(senders, hosts, BULK, strict=False):
            if sender.count:
                words = ["send", address, number, sender.kind, sender.count, UDP]
                line(stack.enter_context(traffic.started(place, *words)))
        time.sleep(1.0)
        began, before = byte_counts(receiver)
        time.sleep(span)
        ended, after = byte_counts(receiver)
        return [(late - early) / (ended - began) for early, late in zip(before, after, strict=True)]


def _put(arm: str, port: str, senders: Sequence[Sends], addresses: Sequence[str], stack: ExitStack) -> None:
    """What stands before the line, and the line."""
    if arm == "htb":
        own = [LINE * sender.weight / sum(other.weight for other in senders) for sender in senders]
        queues.make_classes(port, LINE, own, LINE)
        for number, address in enumerate(addresses, 2):
            queues.classify(port, address, number)
        return
    network.set_rate(port, LINE)
    if arm != "fifo":
        entities = {
            f"e{number}": {"match": address, "weight": sender.weight}
            for number, (sender, address) in enumerate(zip(senders, addresses, strict=True))
        }
        stack.enter_context(traffic.shared(port, LINE, entities, work_conserving=arm == "lent"))
