"""`emulate` as a function: scripts and functions, the typed summary, and the decisions in a run's log."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from support.programs import train
from windtunnel.base.errors import ScriptError, UserError
from windtunnel.base.plain import from_plain
from windtunnel.store.eventlog import NAME, decisions
from windtunnel.store.runs import Store
from windtunnel.training.emulate.exports import joules
from windtunnel.training.emulate.options import Options
from windtunnel.training.emulate.policy import CheckedCells, Decision, Observation, decide
from windtunnel.training.emulate.program import Function
from windtunnel.training.emulate.run import Run, emulate
from windtunnel.training.emulate.summary import Summary
from windtunnel.training.emulate.twin.costs.profile import DeviceProfile, decode, signature


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WINDTUNNEL_HOME", str(tmp_path_factory.mktemp("home")))
        emulation = emulate(train, (256,), "h100-sxm:2x2", pictures=False)
        stored = Store.open().get("last")
    assert stored.status == "done"
    assert stored.summary is not None
    assert Summary.from_json(stored.summary) == emulation.summary
    return emulation


def test_a_function_is_emulated_as_a_script_is(done: Run) -> None:
    summary = done.summary
    assert summary.world_size == 4
    assert summary.command.script.endswith("support.programs.train")
    assert summary.command.args == ("256",)
    assert summary.iteration_time_s > 0
    assert summary.peak_reserved_bytes >= 256 * 256 * 4
    assert summary.fits
    assert [collective.kind for collective in summary.collectives] == ["all_reduce"]
    assert summary.ranks[0].members == (0, 1, 2, 3)


def test_the_operators_of_a_step_lie_in_the_folder_and_their_energies_add_up(done: Run) -> None:
    content = json.loads((done.directory / "operators.json").read_text())
    rows = content["operators"]
    assert all(facts["ranks"] == 4 and facts["kind"] != "view" for *_, facts in rows)
    assert [1, 8, 256, 256] in [facts["shape"] for *_, facts in rows]
    keys = [signature(decode(*row[:3])) for row in rows]
    profile = DeviceProfile("drawn", joules={key: 2.0 + place for place, key in enumerate(keys)})
    total = sum((2.0 + place) * 4 * facts["count"] for place, (*_, facts) in enumerate(rows))
    assert (
        done.result and joules(dataclasses.replace(done.result, profile=profile)) == total / content["period"]
    )
    del profile.joules[keys[0]]
    assert done.result and joules(dataclasses.replace(done.result, profile=profile)) is None
    assert done.summary.joules_per_iteration is None
    assert "joules_per_iteration" not in done.summary.provenance


def test_a_function_that_fails_names_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))

    def broken() -> None:
        raise ValueError("no data")

    with pytest.raises(ScriptError, match=r"test_emulate_run\.py:\d+ in broken: ValueError: no data"):
        emulate(broken, (), "h100-sxm:1x1")
    assert Store.open().get("last").status == "failed"


@pytest.mark.parametrize(
    ("given", "accepted"),
    [
        ({"jitter": -0.1}, "a number from 0 to 1"),
        ({"jitter": float("nan")}, "a number from 0 to 1"),
        ({"jitter": "much"}, "a number from 0 to 1"),
        ({"reserve": -1.0}, "MiB, a number from 0 up"),
        ({"seed": -1}, "a whole number from 0 up"),
        ({"steps": 0}, "a whole number from 1 up"),
        ({"jobs": None}, "a whole number from 1 up"),
        ({"aggregation": "espa"}, "none, switchml, atp or esa"),
        ({"data": "noise"}, "uniform or zeros"),
        ({"attach": 2}, "a whole number from 3 up"),
        ({"neighbours": 16}, "a whole number from 0 to 15"),
    ],
)
def test_options_are_what_they_may_be_in_python_too(given: dict[str, Any], accepted: str) -> None:
    ((name, value),) = given.items()
    with pytest.raises(UserError) as refused:
        Options(**given)
    assert str(refused.value) == f"`{name}`: {value!r} is not accepted; accepted is {accepted}"


def test_what_cannot_travel_is_refused() -> None:
    with pytest.raises(UserError, match="cannot be sent to the process that emulates it"):
        Function(print, (threading.Lock(),)).check()
    with pytest.raises(UserError, match="no function"):
        Function(3).check()  # type: ignore[arg-type]


def test_a_summary_of_another_form_is_refused(done: Run) -> None:
    content = done.summary.to_json()
    assert Summary.from_json(content | {"added_later": 1}) == done.summary
    with pytest.raises(UserError, match=r"no summary of an emulation .*windtunnel\.emulate/3"):
        Summary.from_json(content | {"schema": "windtunnel.emulate/3"})
    for wrong in ("0-x", 7):
        with pytest.raises(UserError, match="no summary of an emulation"):
            Summary.from_json(content | {"captured_ranks": wrong})


def test_the_log_alone_is_enough_to_decide_anew(done: Run) -> None:
    events = decisions(done.directory / NAME)
    assert [event["policy"] for event in events] == ["auto"] * len(events)
    assert {event["capability"] for event in events} == {"training.emulate"}
    observations = [from_plain(Observation, event["observation"]) for event in events]
    recorded = [from_plain(Decision, event["decision"]) for event in events]
    assert [decide(observation) for observation in observations] == recorded
    assert [list(observation.captured) for observation in observations] == [[], [0], [0, 3, 2]]
    assert recorded[:2] == [
        dataclasses.replace(recorded[0], ranks=(0,)),  # type: ignore[call-arg]
        dataclasses.replace(recorded[1], ranks=(3, 2)),  # type: ignore[call-arg]
    ]
    assert isinstance(recorded[-1], CheckedCells)
    assert observations[0].seconds_each is None
    assert (observations[1].seconds_each or 0) > 0
