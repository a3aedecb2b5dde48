"""The packet engine against plain objects, packet for packet, and against what queues and senders are for."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.packets_reference import World
from windtunnel.engines.packets import Flow, Fork, Link, Queue, Simulation

FLOW_FIELDS = (
    "next", "una", "high", "received", "cwnd", "sent", "resent", "copies", "delivered", "consumed", "dropped",
    "lost", "marked", "acks_lost", "timeouts", "delay", "finished", "acks", "srtt", "rto",
)  # fmt: skip
LINK_FIELDS = ("offered", "gated", "dropped", "marked", "lost", "passed", "passed_bytes")
QUEUES = ("fifo", "priority", "drr", "codel", "fq_codel")


def compare(engine: Simulation, truth: World) -> None:
    told = [tuple(int(value) for value in entry) for entry in engine.log.tolist()]
    assert told == truth.log
    for name in FLOW_FIELDS:
        assert engine.flows[name].tolist() == [getattr(flow, name) for flow in truth.flows], name
    for name in LINK_FIELDS:
        assert engine.links[name].tolist() == [getattr(link, name) for link in truth.links], name
    for index, link in enumerate(truth.links):  # a FIFO knows waits that are not over
        assert link.serving or engine.links["wait"][index] == link.wait
    conserved(engine)


def conserved(engine: Simulation) -> None:
    """What was sent is delivered, ended or inside; and so for every link."""
    flows, links = engine.flows, engine.links
    data, acks = engine.inside()
    ended = sum(flows[name] for name in ("delivered", "consumed", "dropped", "lost"))
    assert (flows["sent"] + flows["copies"]).tolist() == (ended + data).tolist()
    answers = ~np.isin(flows["kind"], (0, 6))
    back = flows["acks"] + flows["acks_lost"] + acks
    assert flows["delivered"][answers].tolist() == back[answers].tolist()
    gone = sum(links[name] for name in ("gated", "dropped", "lost", "passed"))
    assert (links["offered"] - gone).sum() == (data + acks).sum()
    assert np.all(links["offered"] >= gone)


def scenario(seed: int) -> tuple[list[Link], list[Flow], np.random.Generator]:
    """Some links with queues that overflow, and flows of all kinds on any way through them."""
    rng = np.random.default_rng(seed)

    def one(*options: Any) -> Any:
        return options[rng.integers(len(options))]

    links = []
    for _ in range(rng.integers(2, 5)):
        queue = Queue(
            one(*QUEUES), packets=int(rng.integers(1, 40)), bytes=one(2**60, 2**60, 9000),
            mark_at=one(0, 3, 8), bands=int(rng.integers(1, 5)), quantum=one(300, 1514),
            target=one(1e-4, 2e-3), interval=one(1e-3, 1e-2),
        )  # fmt: skip
        links.append(Link(one(1e6, 3e6, 1.25e7), one(0.0, 1e-4, 2e-3), queue, one(0, 0, 0.02)))

    def places() -> list[Any]:
        return rng.integers(0, len(links), rng.integers(1, 4)).tolist()

    flows = []
    for _ in range(rng.integers(1, 7)):
        sender = one("reno", "cubic", "dctcp", "vegas", "bbr", "udp")
        route, back = places(), places()
        if sender == "udp":
            back = []
            if one(True, False):
                route += [Fork([places(), [*places(), Fork([places(), places()])], places()])]
        flows.append(
            Flow(
                route,
                back,
                sender,
                size=one(None, None, 100, 20_000, 150_000),
                start=one(0.0, 0.0, 1e-3, 7e-3),
                rate=one(4e5, 2e6) if sender == "udp" else one(None, None, None, 5e5),
                window=one(None, None, None, 1, 7.5),
                ecn=one(True, False),
                band=int(rng.integers(4)),
                packet=one(1500, 500),
                ack=one(64, 40),
                min_rto=one(1e-3, 1e-2),
            )
        )
    return links, flows, rng


SEEDS = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@SEEDS
@given(st.integers(0, 2**32 - 1))
def test_every_packet_has_the_fate_and_the_time_that_plain_objects_give_it(seed: int) -> None:
    """Also when links and caps change between runs, and whatever the runs are cut into."""
    links, flows, rng = scenario(seed)
    engine, truth = Simulation(links, flows, seed=seed, log=True), World(links, flows, seed)
    for until in (0.02, 0.05, 0.13):
        engine.run(until - 0.013)
        engine.run(until)
        truth.run(until)
        compare(engine, truth)
        link, flow = int(rng.integers(len(links))), int(rng.integers(len(flows)))
        rate, loss = float(rng.choice([5e5, 2e6, 1e7])), float(rng.choice([0.0, 0.05]))
        window = float(rng.choice([1.0, 4.0, 100.0]))
        pace = rate / 2 if flows[flow].sender == "udp" else None
        engine.set_rate(link, rate)
        truth.set_rate(link, rate)
        engine.set_loss(link, loss)
        truth.links[link].loss = loss
        engine.set_cap(flow, window=window, rate=pace)
        truth.set_cap(flow, window, pace)
