"""Jobs at an emulated switch: their sums, their ends, and what is equal under all rules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from windtunnel.network.aggregation.policy import ATP, ESA, SWITCHML, SwitchRules
from windtunnel.network.aggregation.twin import AggregationJob, AggregationWorld, emulate

SMALL = AggregationJob(fragments=128, iterations=2)
PAIR = [SMALL, replace(SMALL, workers=3, compute=200e-6, start=20e-6)]
RULES = {
    "switchml": SWITCHML, "atp": ATP, "hold": replace(ATP, hold=True), "esa": ESA,
    "no priority": replace(ESA, priority=False), "no ageing": replace(ESA, ageing=False),
    "no reminder": replace(ESA, remind=False),
}  # fmt: skip


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_sums_are_plain_sums_whatever_gets_lost_and_slots_are_free_at_the_end(rules: SwitchRules) -> None:
    for loss, racks, direct in ((0.0, 1, False), (0.05, 1, True), (0.05, 2, False), (0.2, 3, True)):
        world = AggregationWorld(slots=24, window=16, loss=loss, racks=racks, direct=direct)
        report = emulate(PAIR, world, rules, seed=3)
        assert report.wrong == 0
        if not loss or not (direct or rules.hold):
            assert report.occupied == 0, "a slot whose result was lost is held until its job is further"
        assert all(report.jct), (loss, racks, direct)
        assert report == emulate(PAIR, world, rules, seed=3)


def test_alone_esa_is_atp_to_the_byte() -> None:
    for racks in (1, 2):
        atp, esa = (emulate([SMALL], AggregationWorld(racks=racks), rules, seed=1) for rules in (ATP, ESA))
        assert atp == esa and atp.actions["raw"] == atp.actions["swap"] == atp.resent == 0


def test_with_memory_for_all_every_rule_adds_all_in_the_switch() -> None:
    wanted = sum(job.fragments * job.iterations for job in PAIR)
    for rules in (SWITCHML, ATP, ESA):
        report = emulate(PAIR, AggregationWorld(slots=4096, jitter=0.0, window=16), rules, seed=0)
        assert report.actions["complete"] == report.server_packets == wanted or rules is not SWITCHML
        assert report.actions["complete"] >= 0.95 * wanted


def test_memory_that_is_scarce_goes_to_who_comes_first_or_to_whom_it_is_taken_for() -> None:
    jobs, world = [replace(SMALL, compute=20e-6)] * 6, AggregationWorld(slots=64, window=64, jitter=100e-6)
    atp, esa, static = (emulate(jobs, world, rules, seed=2) for rules in (ATP, ESA, SWITCHML))
    assert atp.actions["swap"] == 0 < esa.actions["swap"]
    assert sum(esa.jct) < sum(atp.jct)
    assert static.actions["raw"] == 0


def test_what_a_network_can_do_at_best_bounds_what_is_emulated() -> None:
    job, world = replace(SMALL, compute=0.0, iterations=1), AggregationWorld(jitter=0.0)
    report = emulate([job], world, ESA, seed=0)
    serial = job.fragments * world.packet / world.rate
    hops = 4 * (world.delay + world.packet / world.rate)
    assert serial < report.jct[0] < 1.1 * (serial + hops)
    up = [report.bytes[2 + 2 * worker] for worker in range(job.workers)]
    assert up == [job.fragments * world.packet] * 4


@pytest.mark.parametrize(
    ("job", "world", "words"),
    [
        (AggregationJob(workers=33), AggregationWorld(), "job 0: workers is 33; accepted is 1 to 32"),
        (
            AggregationJob(fragments=130),
            AggregationWorld(),
            "fragments is 130; accepted is a multiple of its layers",
        ),
        (AggregationJob(), AggregationWorld(slots=0), "slots is 0; accepted is 1 to"),
        (AggregationJob(), AggregationWorld(window=513), "window is 513"),
        (AggregationJob(), AggregationWorld(loss=1.5), "loss is 1.5; accepted is 0 to 1"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    job: AggregationJob, world: AggregationWorld, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        emulate([job], world, ATP, 0)
