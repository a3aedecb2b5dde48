"""Files of jobs by another's hand, the verb that runs them, and its decisions made anew."""

from __future__ import annotations

import copy
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from windtunnel.base.errors import UserError
from windtunnel.base.strict_yaml import read_mapping
from windtunnel.cli.main import app
from windtunnel.network.dag.spec import changed, check
from windtunnel.network.dag.twin import emulate
from windtunnel.replay import replay

DOCUMENT: dict[str, Any] = {
    "version": 1,
    "resources": {
        "a": {"processors": 2, "nic": "10 Gb/s"}, "b": {"processors": 1, "nic": 1.25e9}, "core": "5 Gb/s",
    },
    "jobs": {
        "sort": {
            "begins": "1 s",
            "tasks": {
                "merge": {"compute": "1 s", "host": "b", "after": "shuffle"},
                "read": {"compute": 4, "host": "a", "unit": "1 s"},
                "shuffle": {"send": "2 GB", "from": "a", "to": "b", "pipelined": "read", "unit": "500 MB"},
                "copy": {"send": "1 GB", "loads": {"a.out": 1, "core": 2}, "after": ["read"]},
            },
        }
    },
}  # fmt: skip
READ, TASKS = ("jobs", "sort", "tasks", "read"), ("jobs", "sort", "tasks")


def put(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    document = copy.deepcopy(DOCUMENT)
    inner = document
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = value
    return document


def test_a_file_is_jobs_in_order_on_hosts_and_links() -> None:
    (job,), resources = check(DOCUMENT, "jobs.yaml")
    assert [task.name for task in job.tasks] == ["read", "shuffle", "copy", "merge"]
    assert job.tasks[1].loads == (("a.out", 1.0), ("b.in", 1.0)) and job.tasks[1].unit == 5e8
    assert resources == {
        "a": 2, "b": 1, "a.out": 1.25e9, "a.in": 1.25e9, "b.out": 1.25e9, "b.in": 1.25e9, "core": 6.25e8,
    }  # fmt: skip
    other = check(changed(DOCUMENT, ["read=2 s", "b.nic=1 Gb/s", "sort/copy.after=shuffle"]), "x")
    assert other[0][0].tasks[0].size == 2 and other[1]["b.in"] == 1.25e8
    assert other[0][0].tasks[-1].after == ("shuffle",) or other[0][0].tasks[-2].after == ("shuffle",)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("version",), 2, "version is 2, accepted is 1, the only one"),
        (("resources", "a", "nic"), float("nan"), "resources.a.nic is nan, accepted is a positive number"),
        (("resources", "core"), "fast", "resources.core.rate is 'fast'"),
        (("resources", "a", "processors"), 1.5, "processors is 1.5, accepted is a whole number"),
        (("resources", "c"), {"nic": "1 Gb/s"}, "resources.c, accepted is a host"),
        ((*READ, "compute"), 0, "read.compute is 0, accepted is a positive number of seconds"),
        ((*READ, "compute"), True, "read.compute is True"),
        ((*READ, "send"), "1 GB", "has both of compute and send"),
        ((*READ, "afer"), "x", "did you mean after"),
        ((*READ, "after"), "merge", "tasks wait for each other: "),
        ((*READ, "after"), "lost", "comes after 'lost', accepted are tasks of its job"),
        ((*READ, "host"), "z", "host is 'z', accepted are hosts that there are: a, b"),
        ((*READ, "unit"), "x", "read.unit is 'x', accepted is"),
        ((*TASKS, "copy", "loads"), {"zz": 1}, "is on 'zz', accepted are resources"),
        ((*TASKS, "copy", "loads"), {"b": 1}, "loads b, a host, accepted are links"),
        ((*TASKS, "copy", "send"), 1e300, r"takes 3.2e\+291 s alone"),
        ((*TASKS, "shuffle", "to"), "a", "sends from 'a' to itself"),
        ((*TASKS, "a#b"), {}, "a#b is no name"),
        (TASKS, {}, r"tasks is \{\}, accepted is a mapping of names to tasks"),
        (("jobs",), [1], r"jobs is \[1\], accepted is a mapping"),
    ],
)
def test_what_is_wrong_is_named_with_what_is_accepted(
    path: tuple[str, ...], value: Any, message: str
) -> None:
    with pytest.raises(UserError, match=f"^jobs.yaml: .*{message}"):
        check(put(path, value), "jobs.yaml")


STRANGE = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.lists(st.text(max_size=3)),
    st.dictionaries(st.text(max_size=3), st.integers()), st.sampled_from(["1 s", "2 GB", "a", 1e-300]),
)  # fmt: skip


@given(
    st.sampled_from([
        ("version",), ("resources",), ("resources", "a"), ("resources", "core"), ("jobs", "sort", "begins"),
        *((*READ, name) for name in ("compute", "host", "after", "pipelined", "unit", "coflow", "loads")),
        (*TASKS, "shuffle", "send"), (*TASKS, "shuffle", "unit"), (*TASKS, "copy", "loads"), TASKS,
    ]),
    STRANGE,
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_any_value_anywhere_runs_or_is_refused_in_a_sentence(path: tuple[str, ...], value: Any) -> None:
    try:
        jobs, resources = check(put(path, value), "jobs.yaml")
        done = emulate(jobs, resources, "mxdag")
    except UserError as error:
        assert "accepted" in str(error) and "\n" not in str(error)
    else:
        assert done.jobs["sort"] > 0


def test_the_verb_runs_compares_and_logs_what_replay_makes_anew(tmp_path: Path) -> None:
    file, log = tmp_path / "jobs.yaml", tmp_path / "events.jsonl"
    file.write_text(yaml.safe_dump(DOCUMENT))
    words = ["network", "dag", "run", str(file), "--schedule", "all"]
    done = CliRunner().invoke(app, [*words, "--log", str(log), "--what-if", "read=2 s", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    assert report["jobs"]["sort"]["critical"] == ["read", "copy"] and report["jobs"]["sort"]["length"] == 7.2
    slack = {"read": 0.0, "copy": 0.0, "shuffle": 3.6, "merge": 1.8}
    assert report["jobs"]["sort"]["slack"] == pytest.approx(slack)
    assert set(report["runs"]) == set(report["what_if"]) == {"fair", "fifo", "sebf", "cpath", "mxdag"}
    assert report["what_if"]["mxdag"]["mean"] < report["runs"]["mxdag"]["mean"] == pytest.approx(7.2)
    assert report["runs"]["fair"]["tasks"]["sort"]["read"] == [1.0, 5.0]
    (part,) = replay(log).parts
    assert part.differences == [] and set(part.recorded_by) == set(report["runs"]) and part.recorded_cost
    (other,) = replay(log, "sebf").parts
    assert other.differences
    assert "beside it shuffle -> merge" in CliRunner().invoke(app, words).output
    for wrong in (["--schedule", "best"], ["--what-if", "red=1"], ["--what-if", "read.unit=1e-9"]):
        with pytest.raises(UserError, match=r"accepted (is|are)"):
            CliRunner().invoke(app, [*words, *wrong], catch_exceptions=False)


def test_a_change_is_of_one_task_where_the_file_names_two_by_an_alias(tmp_path: Path) -> None:
    (tmp_path / "jobs.yaml").write_text("""
        version: 1
        resources: {a: {processors: 1, nic: 8 Gb/s}, b: {processors: 1, nic: 8 Gb/s}}
        jobs: {copies: {tasks: {f: &f {send: 1 GB, from: a, to: b}, g: *f}}}
    """)
    document = changed(read_mapping(tmp_path / "jobs.yaml", "file of jobs"), ["f=3 GB"])
    assert [task.size for task in check(document, "jobs.yaml")[0][0].tasks] == [3e9, 1e9]


def test_the_page_shows_what_the_verb_prints(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "dag.md").read_text()
    file, shown = (page.split(f"```{kind}\n")[1].split("```")[0] for kind in ("yaml", "text"))
    (tmp_path / "jobs.yaml").write_text(file)
    command = next(line for line in page.splitlines() if line.startswith("windtunnel network dag run"))
    words = shlex.split(command.replace("jobs.yaml", str(tmp_path / "jobs.yaml")))[1:]
    assert CliRunner().invoke(app, words).output == shown
