"""Traces by name and from files, seated among the places of a job."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from windtunnel.base.errors import UserError
from windtunnel.cli.main import app
from windtunnel.traces.failures import HostChange, load, save, seated

ASKED = ["plan", "resilience", "--cluster", "h100-sxm:16x8", "--state-bytes", "1e12"]


def random() -> np.random.Generator:
    return np.random.default_rng(0)


@st.composite
def captures(draw: st.DrawFn) -> list[HostChange]:
    """Hosts come and go; each has a number of its own."""
    there: set[int] = set()
    count, time = 0, draw(st.floats(0.0, 10.0))
    changes = []
    for _ in range(draw(st.integers(1, 12))):
        gone = draw(st.sets(st.sampled_from(sorted(there)))) if there else set()
        new = set(range(count, count + draw(st.integers(0, 4))))
        count += len(new)
        there = (there - gone) | new
        changes.append(HostChange(time, tuple(sorted(gone)), tuple(sorted(new))))
        time += draw(st.floats(0.1, 5.0))
    return changes


@given(captures(), st.integers(1, 8))
def test_places_are_held_by_as_many_hosts_as_there_are(changes: list[HostChange], places: int) -> None:
    there = set(range(places))
    by_time = {change.time: change for change in seated(changes, places)}
    hosts = seats = 0
    for change in changes:
        done = by_time.get(change.time - changes[0].time)
        if done is not None:
            assert set(done.lost) <= there  # nobody is lost twice
            there -= set(done.lost)
            assert not set(done.joined) & there
            there |= set(done.joined)
        hosts += len(change.joined) - len(change.lost)
        seats = len(there)
        # a host that found no place does not get one later, so there may be fewer than hosts
        assert seats <= min(hosts, places)
    assert all(place < places for place in there)


def test_a_file_of_lines(tmp_path: Path) -> None:
    file = tmp_path / "spot.csv"
    file.write_text("1000,add,a\n1000,add,b\n11000,remove,a\n31000,add,c\n41000,remove,b\n")
    trace = load(str(file), 2, 1e9, random())
    assert trace.changes == (
        HostChange(10.0, (0,), cause="trace"),
        HostChange(30.0, (), (0,), cause="trace"),
        HostChange(40.0, (1,), cause="trace"),
    )
    assert (trace.seconds, trace.replaced, trace.mtbf, trace.away) == (40.0, True, 20.0, 10.0)


def test_named_traces() -> None:
    llama = load("llama3", 128, 30 * 86400.0, random(), domain_size=32)
    assert not llama.replaced and 0 < llama.software < 1 and llama.mtbf > 3600
    spot = load("spot:p3", 64, 1e9, random())
    assert spot.replaced and spot.seconds == pytest.approx(11.4 * 3600) and spot.wide > 0.3
    assert 0 < spot.away < spot.seconds


def test_plan_simulates_a_trace(tmp_path: Path) -> None:
    counts = tmp_path / "capture.json"
    counts.write_text(json.dumps({"metadata": {"gap_seconds": 300}, "data": [16, 16, 14, 16, 15, 16]}))
    said = CliRunner().invoke(app, [*ASKED, "--trace", str(counts), "--json"], catch_exceptions=False)
    plain = json.loads(said.output)
    assert plain["failures"] == 2 and plain["costs"]["replace"] is None
    shown = CliRunner().invoke(app, [*ASKED, "--trace", "spot:g4dn"], catch_exceptions=False)
    assert "when the trace says so" in " ".join(shown.output.split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "one of --mtbf and --trace"),
        (["--mtbf", "3h", "--trace", "llama3"], "and not both"),
        (
            ["--trace", "nowhere.csv"],
            r"nowhere.csv: .*accepted are llama3, spot:p3, spot:g4dn, or a file",
        ),
    ],
)
def test_wrong_traces_are_one_sentence(options: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        CliRunner().invoke(app, [*ASKED, *options], catch_exceptions=False)


def test_empty_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "empty.csv"
    file.write_text("")
    with pytest.raises(UserError, match="nothing happens in it"):
        load(str(file), 4, 1e9, random())


@given(st.integers(0, 2**16), st.sampled_from(["llama3", "spot:p3"]))
def test_what_is_saved_is_loaded(tmp_path_factory: pytest.TempPathFactory, seed: int, name: str) -> None:
    trace = load(name, 64, 60 * 86400.0, np.random.default_rng(seed))
    path = tmp_path_factory.mktemp("trace") / "own.jsonl"
    save(path, replace(trace, source="drawn", licence="CC0"), 64)
    again = load(str(path), 64, 1e9, random())
    assert again == replace(trace, source="drawn", licence="CC0")
    fewer = load(str(path), 8, trace.seconds / 2, random())
    assert fewer.seconds == trace.seconds / 2
    assert all(host < 8 for change in fewer.changes for host in (*change.lost, *change.joined))


HEADER = {
    "kind": "failures",
    "version": 1,
    "source": "a",
    "licence": "b",
    "hosts": 4,
    "seconds": 9,
    "replaced": True,
}
CHANGE = {"time": 1, "lost": [0]}


@pytest.mark.parametrize(
    ("header", "change", "said"),
    [
        (
            {"kind": "agent-session"},
            {},
            "line 1: field kind: 'agent-session' is not accepted; use \"failures\"",
        ),
        ({"version": 2}, {}, "line 1: field version: 2 is not accepted; use 1"),
        ({"licence": 3}, {}, "line 1: field licence: 3 is not accepted; use text"),
        (
            {"hosts": 3},
            {},
            "line 1: field hosts: 3 is not accepted; use a trace of the job's 4 hosts or more",
        ),
        ({"seconds": None}, {}, "line 1: field seconds"),
        ({"replaced": 1}, {}, "line 1: field replaced: 1 is not accepted; use true or false"),
        ({"colour": 1}, {}, "line 1: unknown field colour"),
        ({}, {"time": -1}, "line 2: field time: -1 is not accepted"),
        ({}, {"lost": [4]}, "line 2: field lost: .* use a list of hosts from 0 to 3"),
        ({}, {"joined": [1]}, "line 2: field joined: .* use hosts that are not there"),
        ({}, {"colour": 1}, "line 2: unknown field colour"),
    ],
)
def test_wrong_files_of_failures_are_one_sentence(
    tmp_path: Path, header: dict[str, object], change: dict[str, object], said: str
) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({**HEADER, **header}) + "\n" + json.dumps({**CHANGE, **change}) + "\n")
    with pytest.raises(UserError, match=said):
        load(str(path), 4, 1e9, random())


def test_hosts_are_lost_and_come_in_the_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    lines = [HEADER, {"time": 2, "lost": [1]}, {"time": 3, "joined": [1], "cause": "repaired"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert load(str(path), 4, 1e9, random()).changes == (
        HostChange(2.0, (1,)),
        HostChange(3.0, (), (1,), cause="repaired"),
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in (lines[0], lines[2])))
    with pytest.raises(UserError, match="hosts that are not there"):
        load(str(path), 4, 1e9, random())
    path.write_text("".join(json.dumps(line) + "\n" for line in (*lines, {"time": 1, "lost": [0]})))
    with pytest.raises(UserError, match=r"line 4: field time: 1 is not accepted; use a number .* from 3"):
        load(str(path), 4, 1e9, random())
