"""Shares in the packet engine: who sends how must make no difference. Emulated, five seeds each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.harness.measure import spread
from benchmarks.harness.rows import Row, figure
from windtunnel.network.sharing.policy import decide, fixed
from windtunnel.network.sharing.twin import SharedLink, SharingResult, TenantTraffic, emulate

ARMS = ("aq", "fifo", "policer", "drr", "csfq")
SCENARIOS: dict[str, tuple[TenantTraffic, ...]] = {
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
MARKED = (TenantTraffic("marked reno", 2, feedback="ecn"), TenantTraffic("cubic", 8, "cubic"))
IDLE = (TenantTraffic("busy", 4), TenantTraffic("idle", stops=True))
WORLDS = {"20 us": SharedLink(), "100 us": SharedLink(rtt=100e-6)}


def error(found: SharingResult) -> float:
    """The largest part by which a tenant is off its own rate."""
    return max(abs(got - own) / own for got, own in zip(found.goodput, found.promised, strict=True))


def told(found: Sequence[SharingResult]) -> str:
    """Median goodputs in Gb/s, and what the physical queue and drops were."""
    places = range(len(found[0].goodput))
    goods = " / ".join(f"{spread(one.goodput[k] for one in found).median * 8e-9:.2f}" for k in places)
    wait = spread(one.wait for one in found).median * 1e6
    dropped = spread(one.dropped for one in found).median
    worst = spread(map(error, found)).p95
    return f"{goods} Gb/s; worst seed {worst:.1%}, {wait:.0f} us in the queue, {dropped:.1%} dropped"


def twin_rows(quick: bool) -> Iterator[Row]:
    """Every scenario under every arm, a round trip of 20 and one of 100 us on a line of 10 Gb/s."""
    seeds, seconds = (range(2), 0.2) if quick else (range(5), 0.5)
    for trip, world in list(WORLDS.items())[: 1 if quick else None]:
        for name, tenants in SCENARIOS.items():
            for arm in ARMS:
                found = [emulate(tenants, arm, seconds, seed, world) for seed in seeds]
                off, goal = spread(map(error, found)).median, "<= 2%" if arm == "aq" else ""
                words = f"{trip}: {name}, {arm}: share error"
                yield figure(words, "", goal=goal, emulated=off, note=told(found))
    for name, policy in (("not lent", fixed), ("lent", decide)):
        found = [emulate(IDLE, "aq", seconds, seed, policy=policy) for seed in seeds]
        used, goal = spread(one.goodput[0] / SharedLink().line for one in found).median, ">= 97%"
        words = f"idle neighbour, {name}: of the line"
        yield figure(words, "", goal=goal * (name == "lent"), emulated=used, note=told(found))
    found = [emulate(MARKED, "aq", seconds, seed) for seed in seeds]
    used = spread(one.goodput[0] / one.promised[0] for one in found).median
    yield figure("reno that is marked: of its rate", "", emulated=used, note=told(found))
