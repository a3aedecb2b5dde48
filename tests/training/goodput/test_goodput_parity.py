"""The twin goes through what befell recorded runs: it decides, forms and lays out as they did."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from parity import recorded
from parity.training import decisions, runs
from windtunnel.base.plain import from_plain
from windtunnel.store import eventlog
from windtunnel.traces.failures import HostChange
from windtunnel.training.checkpoint import policy as checkpoint
from windtunnel.training.elastic import policy as elastic
from windtunnel.training.elastic.policy import rules
from windtunnel.training.goodput.twin import cost
from windtunnel.training.goodput.twin.restart import StorageRestart
from windtunnel.training.goodput.twin.simulate import JobModel, PhaseCosts, simulate
from windtunnel.training.goodput.twin.supervisor import TwinSupervisor
from windtunnel.training.goodput.twin.templates import Templates
from windtunnel.training.pipelines import policy as pipelines

Pairs = list[tuple[Any, Any]]
HOSTS, SPARES = 3, 2
JOB = JobModel(HOSTS, 1.0, 1e9)
COSTS = PhaseCosts(detect=0.1, start=1.0, replace=math.inf)
POLICIES: dict[str, Any] = {
    "training.elastic": elastic, "training.checkpoint": checkpoint, "training.pipelines": pipelines,
}  # fmt: skip


def live_runs(capability: str, folder: Path) -> list[list[dict[str, Any]]]:
    return runs(eventlog.read(recorded(capability, folder)))


def decided(events: Sequence[dict[str, Any]], capability: str, *kinds: str) -> Pairs:
    room = POLICIES[capability]
    return [
        (from_plain(room.Observation, event["observation"]), from_plain(room.Decision, event["decision"]))
        for event in decisions(events, capability, *kinds)
    ]


def trace_of(events: Sequence[dict[str, Any]]) -> list[HostChange]:
    """What befell the run: hosts that were lost, by their place, and hosts that came."""
    begin = next(event["t"] for event in events if event["kind"] == "decided")
    trace, gone = [], list[int]()
    for event in events:
        time = event["t"] - begin
        if event["kind"] == "lost" and event["what"] == "host":
            trace.append(HostChange(time, lost=(event["place"],)))
            gone.append(event["place"])
        elif event["kind"] == "host.joined" and event["host"] >= HOSTS + SPARES:
            trace.append(HostChange(time, joined=(gone[-1],)))
    return trace


def test_the_twin_decides_as_the_run_did(tmp_path: Path) -> None:
    """What befell the run, as a trace: the twin orders, waits and forms the same hosts at the same places."""
    replaced, _ = live_runs("training.elastic", tmp_path)

    def orders(pairs: Pairs) -> list[Any]:
        return [
            said.places if isinstance(said, rules.Form) else said.order
            for now, said in pairs
            if now.places
            and not isinstance(said, rules.Keep)
            and (said.places != now.places if isinstance(said, rules.Form) else said.order)
        ]

    lived = decided(replaced, "training.elastic", "Change")
    given = lived[0][0].rules

    def emulated(chosen: rules.Rules) -> list[Any]:
        pairs: Pairs = []
        scheme = StorageRestart(JOB, COSTS, every=5, spares=SPARES)
        scheme.supervisor = TwinSupervisor(HOSTS, SPARES, chosen, lambda now, said: pairs.append((now, said)))
        simulate(scheme, JOB, COSTS, trace_of(replaced), 2000.0)
        return orders(pairs)

    assert emulated(given) == orders(lived) == [(0, 3, 2), (4, 3, 2), 1, (4, 3, 5)]
    assert emulated(replace(given, on_loss="shrink")) != orders(lived)


def test_the_twin_lays_out_what_the_run_did(tmp_path: Path) -> None:
    """A run of pipelines that loses two hosts: the twin, given its templates and the same losses, comes to
    the same layouts and the same copies."""
    (run,) = live_runs("training.pipelines", tmp_path)
    lived = decided(run, "training.pipelines", "HostsChanged")
    assert [len(now.present) for now, _ in lived] == [5, 4, 3]
    first, last = lived[0][0], lived[-1][0]
    job = JobModel(
        5, 1.0, sum(last.layer_bytes), first.templates.n0, first.microbatches, len(last.layer_bytes)
    )
    scheme = Templates(job, COSTS, 10)
    scheme.set, scheme.layer_bytes = first.templates, last.layer_bytes
    scheme.layout = scheme._decided(None, (), first.present, first.microbatches).layout
    assert scheme.layout == lived[0][1].layout
    for (before, _), (now, said) in pairwise(lived):
        gone = set(before.present) - set(now.present)
        assert scheme._change(sorted(gone), ()).transfers == said.transfers
        assert scheme.lost(sorted(gone), False, 0.0) is not None
        assert scheme.layout == said.layout


def test_what_decisions_cost(tmp_path: Path) -> None:
    (replaced, _), (kept, *_) = (
        live_runs("training.elastic", tmp_path), live_runs("training.checkpoint", tmp_path),
    )  # fmt: skip
    changes = decided(replaced, "training.elastic", "Change")
    assert all(cost(now, said)["seconds"] > 0 for now, said in changes if isinstance(said, rules.Form))
    waited = [cost(now, said) for now, said in changes if isinstance(said, rules.Wait) and said.order]
    assert [price["seconds"] for price in waited] == [PhaseCosts().replace]
    loads = [cost(now, plan) for now, plan in decided(kept, "training.checkpoint", "Inventory")]
    assert any(price.get("bytes", 0) > 0 and 0 <= price["steps"] <= 1 for price in loads)
