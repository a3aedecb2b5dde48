"""One real run that loses hosts: what was decided in it is decided anew from its log, and in the twin."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from windtunnel.base.plain import from_plain
from windtunnel.store import eventlog
from windtunnel.traces.failures import Change
from windtunnel.training.checkpoint import policy as checkpoint
from windtunnel.training.elastic import policy as elastic
from windtunnel.training.elastic.policy import rules
from windtunnel.training.goodput.twin import cost
from windtunnel.training.goodput.twin.model import JobModel, PhaseCosts
from windtunnel.training.goodput.twin.restart import StorageRestart
from windtunnel.training.goodput.twin.simulate import simulate
from windtunnel.training.goodput.twin.supervisor import Supervisor
from windtunnel.training.goodput.twin.templates import Templates
from windtunnel.training.launch import launch
from windtunnel.training.pipelines import policy as pipelines

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
HOSTS, SPARES = 3, 1
KILLED = ((1, 2), (2, 5), (0, 8))  # (place, after step)
SCRIPT = """
import torch
from windtunnel.training import elastic
from windtunnel.training.checkpoint import PeerCheckpointer

def train(job):
    state = {"x": torch.zeros(8)}
    checkpointer = PeerCheckpointer(job, copies=2, mode="blocking")
    for step in range(checkpointer.restore(state), 11):
        state["x"] += 1
        checkpointer.step(step, state)
        job.step(step)

elastic.run(train)
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, quick_launch: None) -> list[dict[str, Any]]:
    """The events of a run on three hosts with a spare: three of them are killed, one after the other."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "train.py").write_text(SCRIPT)
    faults = [f"kill:host={place},step={step}" for place, step in KILLED]
    with (folder / "output").open("wb") as output:
        launched = launch(
            folder / "train.py", folder=folder / "run", output=output.fileno(),
            hosts=HOSTS, spares=SPARES, faults=faults, lease=5.0, frozen_after=20.0,
        )  # fmt: skip
    with launched:
        outcome = launched.wait(200)
        assert outcome is not None and outcome.status == 0, (folder / "output").read_text()[-2000:]
    return eventlog.read(folder / "run" / eventlog.NAME)


def decisions(events: list[dict[str, Any]], capability: str) -> list[tuple[Any, Any]]:
    package = {
        "training.elastic": elastic,
        "training.checkpoint": checkpoint,
        "training.pipelines": pipelines,
    }[capability]
    return [
        (from_plain(package.Observation, one["observation"]), from_plain(package.Decision, one["decision"]))
        for one in events
        if one["kind"] == "decision" and one["capability"] == capability
    ]


def test_the_log_decides_anew(recorded: list[dict[str, Any]]) -> None:
    membership = decisions(recorded, "training.elastic")
    assert sum(isinstance(decision, rules.Form) for _, decision in membership) == 1 + len(KILLED)
    for observation, decision in membership:
        assert elastic.decide(observation) == decision
        assert elastic.POLICIES["replace"](observation) == decision
    restored = decisions(recorded, "training.checkpoint")
    plans = [plan for now, plan in restored if isinstance(now, checkpoint.Inventory)]
    assert [plan.step for plan in plans] == [None, *(step for _, step in KILLED)]
    for seen, plan in restored:
        assert checkpoint.decide(seen) == plan


def test_another_policy_is_found_out(recorded: list[dict[str, Any]]) -> None:
    def differing(other: Any) -> int:
        return sum(other(seen) != said for seen, said in decisions(recorded, "training.elastic"))

    def last_spare_first(now: elastic.Observation) -> elastic.Decision:
        return elastic.decide(replace(now, spares=now.spares[::-1]) if isinstance(now, rules.Change) else now)

    assert differing(elastic.decide) == 0
    assert differing(elastic.POLICIES["shrink"]) > 0
    assert differing(elastic.POLICIES["restart"]) > 0
    assert differing(last_spare_first) > 0
    assert any(
        checkpoint.POLICIES["storage"](seen) != said
        for seen, said in decisions(recorded, "training.checkpoint")
    )


def test_a_decision_is_in_the_log_before_what_follows(recorded: list[dict[str, Any]]) -> None:
    formed = [n for n, event in enumerate(recorded) if event["kind"] == "decided"]
    assert formed
    for index in formed:
        said = recorded[index - 1]
        assert said["kind"] == "decision" and said["decision"]["is"] == "Form"
        hosts = [host["id"] for host in recorded[index]["membership"]["hosts"]]
        assert hosts == said["decision"]["places"]


def trace_of(events: list[dict[str, Any]]) -> list[Change]:
    """What befell the run: hosts that were lost, by their place, and those that came for them."""
    begin = next(event["t"] for event in events if event["kind"] == "decided")
    trace = []
    empty: list[int] = []
    for event in events:
        if event["kind"] == "lost" and event["what"] == "host" and event["place"] is not None:
            trace.append(Change(event["t"] - begin, lost=(event["place"],)))
            empty.append(event["place"])
        elif event["kind"] == "host.joined" and event["host"] >= HOSTS + SPARES:
            trace.append(Change(event["t"] - begin, joined=(empty[-1],)))
    return trace


def test_the_twin_decides_as_the_run_did(recorded: list[dict[str, Any]]) -> None:
    """What befell the run, as a trace: the twin orders, waits and forms the same hosts at the same places."""

    def told(seen: list[tuple[Any, Any]]) -> list[Any]:
        return [
            said.places if isinstance(said, rules.Form) else said.order
            for now, said in seen
            if now.places and (isinstance(said, rules.Form) or (isinstance(said, rules.Wait) and said.order))
        ]

    lived = [one for one in decisions(recorded, "training.elastic") if isinstance(one[0], rules.Change)]
    given = lived[0][0].rules

    def emulated(chosen: rules.Rules) -> list[Any]:
        seen: list[tuple[Any, Any]] = []
        scheme = StorageRestart(JOB, COSTS, every=5, spares=SPARES)
        scheme.supervisor = Supervisor(HOSTS, SPARES, chosen, lambda now, said: seen.append((now, said)))
        simulate(scheme, JOB, COSTS, trace_of(recorded), 2000.0)
        return told(seen)

    assert emulated(given) == told(lived) == [(0, 3, 2), 1, (0, 3, 4), 1, (5, 3, 4)]
    assert emulated(replace(given, on_loss="shrink")) != told(lived)


def test_the_twin_lays_out_what_the_run_did(tmp_path: Path) -> None:
    """A run of pipelines that loses two hosts: the twin, given its templates and the same losses, comes to
    the same layouts and the same copies."""
    with (tmp_path / "output").open("wb") as output:
        launched = launch(
            ROOT / "examples" / "train_pipeline.py", ["--steps", "8"], folder=tmp_path / "run",
            output=output.fileno(), hosts=5, lease=5.0, frozen_after=20.0,
            faults=["kill:host=1,step=2", "kill:host=3,step=5"], on_loss="shrink",
        )  # fmt: skip
    with launched:
        outcome = launched.wait(200)
        assert outcome is not None and outcome.status == 0, (tmp_path / "output").read_text()[-2000:]
    lived = [
        (now, said)
        for now, said in decisions(eventlog.read(tmp_path / "run" / eventlog.NAME), "training.pipelines")
        if isinstance(now, pipelines.HostsChanged)
    ]
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


JOB = JobModel(HOSTS, 1.0, 1e9)
COSTS = PhaseCosts(detect=0.1, start=1.0, replace=math.inf)


def test_what_decisions_cost(recorded: list[dict[str, Any]]) -> None:
    changes = decisions(recorded, "training.elastic")
    priced = [cost(now, said) for now, said in changes if isinstance(said, rules.Form)]
    assert all(one["seconds"] > 0 for one in priced)
    waited = [cost(now, said) for now, said in changes if isinstance(said, rules.Wait) and said.order]
    assert waited and all(one["seconds"] == PhaseCosts().replace for one in waited)
    loads = [cost(now, plan) for now, plan in decisions(recorded, "training.checkpoint")]
    assert any(one.get("bytes", 0) > 0 and 0 <= one["steps"] <= 1 for one in loads)
