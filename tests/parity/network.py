"""Networks: a live run of each, and drawn observations for the rules that so short a run does not reach."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from parity import Event, Mutant, Parity, drawn
from windtunnel.base.errors import UserError
from windtunnel.base.plain import from_plain
from windtunnel.capabilities import CAPABILITIES
from windtunnel.network.aggregation.policy import (
    RULES,
    FragmentOffer,
    OverdueFragment,
    PartialSum,
    ResendDecision,
    SumDecision,
    SwitchRules,
)
from windtunnel.network.dag import generate, twin
from windtunnel.network.dag.policy import SCHEDULES, Decision, GraphJob, Observation, PendingTask
from windtunnel.network.dag.policy.forecast import filled
from windtunnel.network.hostrate import policy as hostrate
from windtunnel.network.mobilerate.policy import POLICIES as RATES
from windtunnel.network.mobilerate.policy import RateSettings as Rates
from windtunnel.network.multicast import policy as multicast
from windtunnel.network.multicast.policy.repair import MOST, TRIES, MissingPackets, RepairDecision
from windtunnel.network.multicast.policy.shuffle import Shuffle
from windtunnel.network.sharing import policy as sharing
from windtunnel.network.sharing.policy.units import rate_units

Draw = np.random.Generator
UNPACED = 2**32 - 1
POLICIES = {
    capability.name: capability.room("policy")
    for capability in CAPABILITIES
    if capability.name.startswith("network.")
}


def _done(events: Sequence[Event]) -> Iterator[tuple[Any, Any, Event]]:
    """Each decision of live as observation and decision, and the effect that follows it in the log, or what
    else does."""
    for event, after in pairwise([*events, {"kind": "the end"}]):
        if event["kind"] == "decision" and "drawn" not in event:
            policy = POLICIES[event["capability"]]
            observation = from_plain(policy.Observation, event["observation"])
            yield observation, from_plain(policy.Decision, event["decision"]), after


def _deviations(decision: Any, wanted: Any, after: Event) -> list[str]:
    """What live did other than it is wanted to."""
    did = {name: value for name, value in after.items() if name in wanted}
    return (
        [] if did == wanted and after["kind"] == "effect" else [f"of {decision} came {after}, not {wanted}"]
    )


def _of(draw: Draw, *values: Any) -> Any:
    return values[int(draw.integers(len(values)))]


# --- sharing: the rates that the kernel's program holds packets to


def share(folder: Path) -> list[Path]:
    from support.sharing import lent

    return [lent(folder), drawn(folder, "network.sharing", _shares(np.random.default_rng(1)))]


def _shares(draw: Draw) -> Iterator[tuple[str, Any]]:
    for number in range(150):
        entities = tuple(
            sharing.SharingTenant(
                f"e{place}", float(draw.integers(1, 4)), _of(draw, None, None, 5e6),
                float(_of(draw, 0, 1e3, 4e6, 2e7, 6e7)), _of(draw, None, 0.0, 0.1, 0.2, 0.3),
            )
            for place in range(int(draw.integers(1, 5)))
        )  # fmt: skip
        yield "fixed" if number % 10 == 0 else "lend", sharing.Observation(1e8, entities)


def shared(events: Sequence[Event]) -> list[str]:
    faults = []
    for _, decision, after in _done(events):
        wanted = [max(map(rate_units, pair)) for pair in zip(decision.own, decision.lent, strict=True)]
        faults += _deviations(decision, {"lent": wanted}, after)
    return faults


# --- hostrate: the windows that the kernel's congestion control keeps to


def hold(folder: Path) -> list[Path]:
    from support.hostrate import held_back

    return [held_back(folder), drawn(folder, "network.hostrate", _queues(np.random.default_rng(2)))]


def _queues(draw: Draw) -> Iterator[tuple[str, Any]]:
    for number in range(300):
        upper = _of(draw, 8, 25)
        settings = hostrate.WindowSettings(
            1.25e7, float(_of(draw, 2e-4, 5e-3)), upper=upper, lower=upper // 2
        )
        entities = tuple(
            hostrate.WindowTenant(
                f"e{place}", float(draw.integers(1, 4)), float(_of(draw, 0, 0, 100, 2000, 8000)),
                int(draw.integers(0, 20)), int(draw.integers(0, 4)),
            )
            for place in range(int(draw.integers(1, 4)))
        )  # fmt: skip
        backlog = float(_of(draw, 0, upper / 2 - 1, upper / 2, upper, upper + 1, 60))
        total = int(_of(draw, 0, 5, settings.least, 40, 64 * settings.least, 200 * settings.least))
        policy = _of(draw, "published", "free") if number % 10 == 0 else "weights"
        yield policy, hostrate.Observation(settings, backlog, total, entities)


def held(events: Sequence[Event]) -> list[str]:
    faults = []
    for observation, decision, after in _done(events):
        payload = (observation.settings.packet - 52) / (observation.settings.packet + 14)
        wanted = [
            [0] * 6
            if share.free
            else [
                *share.each,
                share.turn,
                share.flows,
                UNPACED if share.pace is None else int(share.pace * payload),
                0,
            ]
            for share in decision.shares
        ]
        faults += _deviations(decision, {"clamps": wanted}, after)
    return faults


# --- aggregation: what the switch and the server hold after a packet, and what they send


def add(folder: Path) -> list[Path]:
    from support.aggregation import recorded

    return [*recorded(folder), drawn(folder, "network.aggregation", _packets(np.random.default_rng(3)))]


def _packets(draw: Draw) -> Iterator[tuple[str, Any]]:
    for _ in range(700):
        rules = _of(draw, *RULES.values(), SwitchRules(preempt=True), SwitchRules(hold=True, ageing=True))
        level, there = int(draw.integers(0, 6)), int(draw.integers(0, 8))
        mine, whole, late, resent = (bool(draw.random() < chance) for chance in (0.4, 0.2, 0.1, 0.15))
        offered = FragmentOffer(
            rules, int(draw.integers(1, 8)), 7, int(draw.integers(0, 6)), resent, late,
            bool(draw.random() < 0.8), mine, int(_of(draw, 0, 0, 1, 2)), whole, 7 if whole else there, level,
        )  # fmt: skip
        yield "decide", offered
    yield from (("decide", PartialSum(bits, have, 7)) for bits in range(8) for have in range(8))
    for _ in range(100):
        waited, asked, later = int(draw.integers(0, 60)), int(draw.integers(0, 5)), int(draw.integers(0, 5))
        yield "decide", OverdueFragment(waited, 10, asked, later, 3)


SENT = {"complete": 1, "raw": 1, "swap": 1, "flush": 2}
"""Datagrams of a switch whose results the server sends."""


def added(events: Sequence[Event]) -> list[str]:
    faults, asked, reminders = [], 0, 0
    for observation, decision, after in _done(events):
        match decision:
            case ResendDecision():  # all that came at once are followed by how often it has asked by then
                asked += 1
                reminders = after.get("reminders", reminders)
            case SumDecision(action="answer", have=have):  # to whom asks again, and to nobody else
                faults += _deviations(decision, {"have": have}, after)
            case SumDecision(action, have):
                faults += _deviations(
                    decision, {"have": have, "sent": int(action in ("take", "complete"))}, after
                )
            case _ if decision.action == "flush" and not observation.whole:
                faults += _deviations(decision, {"occupied": 0, "sent": 2}, after)
            case _:
                rest = {
                    "there": decision.there,
                    "level": decision.level,
                    "sent": SENT.get(decision.action, 0),
                }
                held = {"take": 1, "add": 1, "swap": 1, "complete": 0}.get(
                    decision.action, int(observation.occupied)
                )
                faults += _deviations(decision, {**rest, "occupied": held}, after)
    return faults + [f"{asked} reminders were decided and {reminders} sent"] * (asked != reminders)


# --- dag: rates of flows, and the order in which they and computing tasks begin


def order(folder: Path) -> list[Path]:
    from support.dag import recorded

    return [recorded(folder), drawn(folder, "network.dag", _instants(np.random.default_rng(4)))]


def _instants(draw: Draw) -> Iterator[tuple[str, Observation]]:
    """Of jobs on the twin under every schedule; then of one with too many tasks to look ahead."""
    for schedule in SCHEDULES:
        for _ in range(8 if schedule == "mxdag" else 2):
            jobs = [generate.random_graph(f"j{k}", draw, hosts=2, tasks=6, begins=k / 2) for k in range(3)]
            jobs.append(generate.mapreduce("m", draw, hosts=2, maps=2, reduces=2, begins=0.5))
            yield from ((schedule, observation) for observation in islice(_looks(jobs, schedule), 20))
    jobs = [generate.random_graph("many", draw, hosts=2, tasks=20)]
    yield (
        "mxdag",
        next(
            observation
            for observation in _looks(jobs, "mxdag")
            if any(task.ready for task in observation.pending)
        ),
    )


def _looks(jobs: list[GraphJob], schedule: str) -> Iterator[Observation]:
    observations: list[Observation] = []
    twin.emulate(
        jobs, generate.hosts(2), schedule, decided=lambda observation, _: observations.append(observation)
    )
    return iter(observations)


def ordered(events: Sequence[Event]) -> list[str]:
    faults, under_way = [], set()
    for observation, decision, after in _done(events):
        loads = {(pending.job, pending.task.name): pending.task.loads for pending in observation.pending}
        rates = filled(decision.shares, loads, observation.resources)
        keys = [(share.job, share.task) for share in decision.shares]
        faults += _deviations(decision, {
            "rates": [[*key, rates[key] * max(times for _, times in loads[key])] for key in keys],
            "sent": [list(key) for key in keys if key not in under_way],
            "begun": [list(key) for key in decision.begin],
        }, after)  # fmt: skip
        under_way |= set(keys)
    return faults


def in_twin(events: Sequence[Event]) -> list[tuple[Any, Any]]:
    """Jobs that come when they came live: who begins, and who goes before whom, as often as that changes."""
    jobs: dict[str, tuple[float, list[PendingTask]]] = {}
    live: list[tuple[Observation, Decision]] = [
        (observation, decision) for observation, decision, _ in _done(events)
    ]
    for observation, _ in live:
        for job in {pending.job for pending in observation.pending} - jobs.keys():
            jobs[job] = observation.now, [pending for pending in observation.pending if pending.job == job]
    coming = [
        GraphJob(name, tuple(pending.task for pending in tasks), begins)
        for name, (begins, tasks) in jobs.items()
    ]
    there: list[Decision] = []
    first = live[0][0]
    twin.emulate(coming, first.resources, first.schedule, decided=lambda _, decision: there.append(decision))

    def changes(decisions: Iterable[Decision]) -> list[Any]:
        changed: list[Any] = [None]
        for decision in decisions:
            ranks = [(share.job, share.task, share.priority) for share in decision.shares]
            changed += [(decision.begin, ranks)] * (
                bool(decision.begin) or changed[-1] is None or changed[-1][1] != ranks
            )
        return changed[1:]

    theirs, own = changes(decision for _, decision in live), changes(there)
    length = max(len(theirs), len(own))
    return list(zip(*(side + [None] * (length - len(side)) for side in (theirs, own)), strict=True))


# --- multicast: who relays, and what is asked for again


def relay(folder: Path) -> list[Path]:
    from support.multicast import sent

    return [sent(folder), drawn(folder, "network.multicast", _fabrics(np.random.default_rng(5)))]


def _fabrics(draw: Draw) -> Iterator[tuple[str, Any]]:
    for number in range(160):
        shuffle = Shuffle(*_of(draw, (2, 2), (2, 3), (3, 2)))
        racks = list(range(shuffle.racks))
        sources = draw.choice(racks, int(draw.integers(1, 4))).tolist()
        requests = tuple(
            multicast.MulticastRequest(
                source, tuple(to for to in racks if to != source and draw.random() < _of(draw, 0.2, 1))
            )
            for source in sources
        )
        dead = tuple(rack for rack in racks if rack not in sources and draw.random() < _of(draw, 0, 0.1))
        cut = tuple((rack, to) for rack in racks for to in shuffle.fed_by(rack) if draw.random() < 0.1)
        fabric = multicast.SplitterFabric(shuffle.p, shuffle.k, requests, dead, _of(draw, (), cut))
        try:
            multicast.decide(fabric)
        except UserError:
            continue  # a rack is cut off
        yield "serial" if number % 8 == 0 else "packed", fabric
    for _ in range(200):
        missing = tuple(range(int(_of(draw, 1, 3, MOST + 5))))
        hop, asked = int(draw.integers(1, 5)), int(_of(draw, 0, 1, 2, 3, 4, TRIES - 1, TRIES))
        lost, gone = bool(draw.random() < 0.5), _of(draw, (), (), (1,), (0,), (0, 1))
        quiet = float(draw.integers(1, 41)) / 100
        yield (
            _of(draw, "packed", "serial"),
            MissingPackets(0, 1, hop, missing, lost, quiet, asked, 0.01, gone),
        )


def relayed(events: Sequence[Event]) -> list[str]:
    """Racks write the same log at once, so each one's events are in order, but not beside each other."""
    faults: list[str] = []
    asked: dict[int, Any] = {}
    tree: Any = None
    for event in events:
        if event["kind"] == "decision" and "drawn" not in event:
            decision: Any = from_plain(multicast.Decision, event["decision"])
            if isinstance(decision, RepairDecision):
                if event["rack"] in asked:
                    faults.append(f"rack {event['rack']} did not do {asked[event['rack']]}")
                asked[event["rack"]] = decision
            else:
                ((tree,),) = decision.rounds
        elif event["kind"] == "effect" and "ask" in event:
            wanted = asked.pop(event["rack"], None)
            faults += _deviations(wanted, {"ask": wanted.ask, "packets": list(wanted.packets)}, event)
        elif event["kind"] == "effect":
            feeders = {rack: feeder for rack, feeder, _ in tree.listeners}
            rack, relays = event["rack"], event["rack"] in tree.transmitters
            faults += _deviations(tree, {"feeder": feeders.get(rack, -1)}, event)
            if bool(event["relayed"]) != relays:
                faults.append(f"rack {rack} sent {event['relayed']} packets; it is to relay: {relays}")
    return faults + [f"rack {rack} did not do {repair}" for rack, repair in asked.items()]


# --- mobilerate: the pace of the next interval


def pace(folder: Path) -> list[Path]:
    from support.mobilerate import recorded

    return [recorded(folder), drawn(folder, "network.mobilerate", _intervals(np.random.default_rng(6)))]


def _intervals(draw: Draw) -> Iterator[tuple[str, Any]]:
    """Every few intervals of senders on a link that walks, with a window that is short to write, and the
    first ones in which something that was held back is made up for."""
    from support.mobilerate import driven

    for policy in RATES:
        rare = 20
        for number, (observation, decision) in enumerate(driven(policy, draw, 2000, Rates(intervals=50))):
            makes_up = rare > 0 and decision.memory.unsent < observation.memory.unsent
            rare -= makes_up
            if makes_up or number % 23 == 0:
                yield policy, observation


def paced(events: Sequence[Event]) -> list[str]:
    faults = []
    for observation, decision, after in _done(events):
        faults += _deviations(
            decision, {"gap_ns": round(observation.settings.packet / decision.rate * 1e9)}, after
        )
    return faults


PARITY = {
    "network.mobilerate": Parity(pace, paced, root=True),
    "network.sharing": Parity(share, shared, root=True),
    "network.aggregation": Parity(add, added),
    "network.dag": Parity(order, ordered, in_twin, root=True),
    "network.hostrate": Parity(hold, held, root=True),
    "network.multicast": Parity(relay, relayed, root=True),
}


def _mutant(name: str, file: str, rule: str, other: str, *, live: bool = False) -> Mutant:
    return Mutant(f"network.{name}", f"network/{name}/{file}", rule, other, live)


MUTANTS = (
    _mutant("aggregation", "live/switch.py", "slot.level = level_after\n        datagrams", "datagrams",
            live=True),
    _mutant("aggregation", "policy/__init__.py", "level >> 1 if rules & AGEING else level", "level"),
    _mutant("aggregation", "policy/__init__.py", "priority > level or not", "priority >= level or not"),
    _mutant("sharing", "live/lending.py", "for rate in decision.lent]", "for rate in decision.own]",
            live=True),
    _mutant("sharing", "policy/__init__.py", "since_trouble < HELD and", "since_trouble <= HELD and"),
    _mutant("dag", "live/__init__.py", "filled(decision.shares, loads",
            "filled([replace(one, priority=0) for one in decision.shares], loads", live=True),
    _mutant("dag", "policy/__init__.py", "return own > over, rest", "return own > 0, rest"),
    _mutant("hostrate", "policy/__init__.py", "return max(least, observation.total + int(off))",
            "return least"),
    _mutant("mobilerate", "policy/__init__.py", "acked += owed[0][1] if few else 0.0", "acked += owed[0][1]"),
    _mutant("mobilerate", "policy/__init__.py", "* min(most / trip, 1.0)", "* (most / trip)"),
    _mutant("mobilerate", "live/transport.py", "settings.packet / decision.rate", "room / decision.rate",
            live=True),
    _mutant("multicast", "policy/__init__.py", "load[rack], rack))", "rack))"),
    _mutant("multicast", "policy/repair.py", "2 ** min(lacking.asked, 3)", "2 ** min(lacking.asked, 4)"),
)  # fmt: skip
