"""Templates in the twin decide as the runtime does, and advice follows from what it is asked."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from windtunnel.base.errors import UserError
from windtunnel.cli.main import app
from windtunnel.traces.failures import HostChange, poisson
from windtunnel.training import session
from windtunnel.training.checkpoint.policy.placement import survives
from windtunnel.training.goodput.advise import advise
from windtunnel.training.goodput.model import Question
from windtunnel.training.goodput.twin import templates as twin_templates
from windtunnel.training.goodput.twin.restart import regroup_time
from windtunnel.training.goodput.twin.simulate import (
    MEMORY,
    STORAGE,
    TEMPLATES,
    WITH_SPARE,
    JobModel,
    PhaseCosts,
    simulate,
)
from windtunnel.training.goodput.twin.templates import Neighbourhood, Templates
from windtunnel.training.pipelines.policy.reconfigure import reconfigure

JOB = JobModel(hosts=24, step_time=5.0, state_bytes=96e9, stages=3, microbatches=96, layers=24)
COSTS = PhaseCosts(detect=1.0, start=20.0, replace=300.0)
SCHEMES = {STORAGE, MEMORY, WITH_SPARE, TEMPLATES}


@given(
    losses=st.lists(st.lists(st.integers(0, 23), min_size=1, max_size=2, unique=True), max_size=5),
    joins=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_the_neighbourhood_decides_as_the_whole(losses: list[list[int]], joins: bool) -> None:
    scheme = Templates(JOB, COSTS, 100)
    layout, dead, around = scheme.layout, set[int](), None
    for loss in losses:
        gone = [host for host in loss if host not in dead]
        dead.update(gone)
        came = [min(dead)] if joins and len(dead) > 2 else []
        dead.difference_update(came)
        gone = [host for host in gone if host not in came]
        came = [host for host in came if not any(host in p for p in layout.pipelines)]
        arguments = {"layer_bytes": scheme.layer_bytes, "search": False}
        whole = reconfigure(scheme.set, layout, gone, came, microbatches=96, **arguments)  # type: ignore[arg-type]
        if around is None or around.layout is not layout:
            around = Neighbourhood(layout, scheme.set.n0)
        near = around.near(gone, came)
        before = around.part(near)
        part = reconfigure(
            scheme.set,
            before,
            gone,
            came,
            microbatches=sum(before.microbatches),
            **arguments,  # type: ignore[arg-type]
        )
        if whole.how != "search":
            assert tuple(around.merged(near, part.layout.pipelines)) == whole.layout.pipelines
            assert part.how == whole.how and part.lost == whole.lost
            around.change(near, part.layout.pipelines, whole.layout)
        layout = whole.layout


def test_a_large_job_uses_all_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twin_templates, "WHOLE", 4)
    trace = poisson(24, 400.0, 86400.0, np.random.default_rng(3), software=0.2)
    scheme = Templates(JOB, COSTS, 100)
    result = simulate(scheme, JOB, COSTS, trace, 86400.0)
    assert sum(result.phases.values()) == pytest.approx(86400.0)
    assert result.goodput > 0.7
    assert sum(scheme.layout.microbatches) == JOB.microbatches
    present = set(range(24)) - scheme.supervisor.missing
    assert {host for pipeline in scheme.layout.pipelines for host in pipeline} == present


def question(**changes: object) -> Question:
    fields: dict[str, object] = {
        "job": JOB, "costs": COSTS, "mtbf": 3600.0, "horizon": 10 * 86400.0, "host_memory": 100e9,
        "domains": tuple(f"rack {n // 6}" for n in range(24)),
    }  # fmt: skip
    return Question(**{**fields, **changes})  # type: ignore[arg-type]


def test_advice_names_copies_placement_and_the_way_to_go_on() -> None:
    trace = poisson(24, 3600.0, 10 * 86400.0, np.random.default_rng(0))
    advice = advise(question(), trace)
    assert advice.chosen.copies == 2 and advice.chosen.placement.kind == "domains"
    assert {result.scheme for result in advice.results} == SCHEMES
    by_name = {result.scheme: result.goodput for result in advice.results}
    # the spare is one host more than the others hold
    by_name["peer memory, a spare"] *= 24 / 25
    assert advice.scheme == max(SCHEMES, key=lambda name: by_name[name])
    assert any("failure domains" in reason for reason in advice.reasons)
    promise = [reason for reason in advice.reasons if "a copy of each layer is left" in reason]
    assert len(promise) == (advice.scheme == "templates")


def test_expected_falls_to_storage_are_those_of_drawn_losses() -> None:
    """Losses drawn for long: how often all holders of a shard are lost within one window."""
    asked = question(domains=("",) * 24, mtbf=1500.0, horizon=4e6)
    choices = advise(asked, ()).choices
    for copies, times, off in ((2, 10, 0.1), (3, 100, 0.25)):
        choice = choices[copies - 1]
        costs = asked.costs
        window = costs.detect + costs.replace + costs.start + regroup_time(costs, 24)
        window += JOB.state_bytes / 24 / costs.peer_bandwidth + choice.every * JOB.step_time
        fatal = 0
        away: dict[int, float] = {}
        for change in poisson(24, asked.mtbf, times * asked.horizon, np.random.default_rng(1)):
            away = {host: since for host, since in away.items() if since > change.time - window}
            (host,) = change.lost
            if host in away:
                continue
            fatal += survives(choice.placement, away) and not survives(choice.placement, [*away, host])
            away[host] = change.time
        assert choice.fallbacks == pytest.approx(fatal / times, rel=off)


def test_the_interval_of_storage_follows_what_memory_does_not_cover() -> None:
    """Not the time of a write, whatever fails how often."""
    slow = replace(COSTS, save_stall=2.0)  # a write of 9.6 s, 2 steps
    intervals = [
        advise(question(costs=slow, mtbf=mtbf, domains=("",) * 24, horizon=1e5), ()).choices[1].storage_every
        for mtbf in (60.0, 1800.0, 6 * 3600.0, 30 * 86400.0)
    ]
    assert intervals == sorted(set(intervals)) and intervals[-1] == 86_400 / JOB.step_time
    shared = advise(question(costs=replace(slow, storage_share=0.01), mtbf=60.0), ())
    # 960 s, whatever a failure a minute asks for
    assert shared.chosen.storage_every == shared.intervals["restart from storage"] == 192
    alone = advise(question(costs=slow, host_memory=10e9), ())
    assert alone.chosen.copies == 1
    # one copy covers what leaves the host alive: nothing of these failures
    assert alone.chosen.storage_every == alone.intervals["restart from storage"]
    with pytest.raises(UserError, match="more than `storage_within` 5 s"):
        advise(question(longest=5.0), ())


def test_memory_that_does_not_fit_is_refused_with_the_sum() -> None:
    with pytest.raises(UserError, match=r"2 slots x \(4 GB of its own \+ 0 B held for others\) = 8 GB"):
        advise(question(host_memory=5e9), ())
    tight = advise(question(host_memory=10e9), (HostChange(100.0, (1,)),))
    assert tight.chosen.copies == 1


ASKED = [
    "plan", "resilience", "--cluster", "h100-sxm:16x8", "--state-bytes", "1e12", "--mtbf", "3h", "--days",
    "5",
]  # fmt: skip


def test_plan_prints(tmp_path: Path) -> None:
    runner = CliRunner()
    shown = runner.invoke(app, ASKED, catch_exceptions=False)
    assert shown.exit_code == 0 and "Recommended" in shown.output and "emulated" in shown.output
    plain = json.loads(runner.invoke(app, [*ASKED, "--json"], catch_exceptions=False).output)
    assert plain["origin"] == "emulated" and plain["copies"] >= 1
    assert plain["command"] in shown.output
    assert plain["scheme"] in SCHEMES and {scheme["name"] for scheme in plain["schemes"]} == SCHEMES
    again = json.loads(runner.invoke(app, [*ASKED, "--json"], catch_exceptions=False).output)
    assert plain == again
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"detect": 0.05, "start": 2.5}))
    costs_of_percent = tmp_path / "percent.json"
    costs_of_percent.write_text(json.dumps({"storage_share": 50}))
    with pytest.raises(UserError, match="storage_share is 50; a number above 0 and up to 1 is accepted"):
        runner.invoke(app, [*ASKED, "--costs", str(costs_of_percent)], catch_exceptions=False)
    measured = json.loads(
        runner.invoke(app, [*ASKED, "--json", "--costs", str(costs)], catch_exceptions=False).output
    )
    assert measured["costs"]["detect"] == 0.05


def test_the_commands_are_taken_by_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed is a command line of ``windtunnel train``, with the intervals that were recommended."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("pass")
    asked = [*ASKED, "--save-stall", "2s", "--json"]
    plain = json.loads(CliRunner().invoke(app, asked, catch_exceptions=False).output)
    assert plain["command"] == plain["commands"][plain["scheme"]]
    jobs = {}
    for name, line in plain["commands"].items():
        monkeypatch.setattr(
            session,
            "train_and_store",
            lambda job, *_, name=name, **__: jobs.update({name: job}),
        )
        program, *words = shlex.split(line)
        assert program == "windtunnel"
        taken = CliRunner().invoke(app, words, catch_exceptions=False)
        assert taken.exit_code == 0, (line, taken.output)
    assert set(jobs) == SCHEMES
    memory = jobs["peer memory, a spare"]
    assert (memory.hosts, memory.per_host, memory.spares) == (16, 8, 1)
    assert (memory.copies, memory.every, memory.persist) == (plain["copies"], plain["every"], "checkpoints")
    if plain["scheme"].startswith("peer"):
        assert memory.persist_every == plain["persist_every"]
    storage = jobs["restart from storage"]
    assert storage.every == storage.persist_every < memory.persist_every
    program = shlex.split(plain["commands"]["templates"])[-4:]
    assert program[:3] == ["--checkpoint", "checkpoints", "--checkpoint-every"] and int(program[3]) > 0
    shrinks = jobs["templates"].rules
    assert shrinks.shrinks and 1 < shrinks.minimum <= plain["job"]["stages"]


def planned(*changed: str) -> dict[str, Any]:
    asked = [*ASKED, *changed, "--json"]
    plain: dict[str, Any] = json.loads(CliRunner().invoke(app, asked, catch_exceptions=False).output)
    return plain


@pytest.mark.parametrize("hosts", [1, 4])
def test_a_job_whose_hosts_hold_it_once_is_planned_for_all_the_same(hosts: int) -> None:
    """Its only pipeline has the last copy of each layer."""
    plain = planned("--cluster", f"h100-sxm:{hosts}x8", "--state-bytes", "1e12" if hosts > 1 else "1e11")
    assert plain["job"]["stages"] > hosts // 2
    assert {scheme["name"] for scheme in plain["schemes"]} == SCHEMES
    if plain["scheme"] == TEMPLATES:
        assert any("may take the last copy of a layer" in reason for reason in plain["reasons"])


def test_a_program_without_templates_is_told_of_the_best_of_the_others() -> None:
    """Where only processes end a spare is worth nothing."""
    plain = planned("--software", "1", "--mtbf", "1h")
    assert plain["scheme"] == TEMPLATES
    assert any("Any other program uses peer memory (" in reason for reason in plain["reasons"])


@pytest.mark.parametrize("spares", [0, 2])
def test_of_a_spare_that_nobody_wants_nothing_is_said(spares: int) -> None:
    asked = [*ASKED, "--spares", str(spares), "--json"]
    plain = json.loads(CliRunner().invoke(app, asked, catch_exceptions=False).output)
    assert {scheme["name"] for scheme in plain["schemes"]} == SCHEMES - {"peer memory, a spare"}
    assert not any("a spare" in reason.lower() for reason in plain["reasons"])
    assert ("--spares 2" in plain["commands"]["peer memory"]) == (spares == 2)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["--mtbf", "soon"], "--mtbf 'soon' is not accepted"),
        (["--state-bytes", "1e16"], "do not hold a state"),
        (["--mtbf", "1ms"], "at most 100000"),
        (["--costs", "/nowhere.json"], "is no JSON file"),
        (["--storage-within", "10s"], "a checkpoint takes 50 s to storage"),
        (["--save-stall", "long"], "--save-stall 'long' is not accepted"),
    ],
)
def test_wrong_questions_are_one_sentence(changed: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        CliRunner().invoke(app, [*ASKED, *changed], catch_exceptions=False)
