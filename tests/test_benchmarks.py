"""What every bench is written with, on a bench that measures nothing."""

import json
import math
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import benchmarks.__main__ as verb
from benchmarks import ROOT
from benchmarks.harness import jobs, measure, run, show
from benchmarks.harness.rows import Row, figure, format_value, guarded, need, published, reached
from benchmarks.harness.run import BENCHES
from support.waiting import PATIENCE
from windtunnel.base.errors import ScriptError, UserError
from windtunnel.training.elastic.events import Event

ROWS = {
    "time": [
        Row("a job", "s", measured=0.2, emulated=0.19, target="<= 4%", passed=False, source="three runs"),
        Row("a | pipe", "times", published=3.0),
    ],
    "memory": [Row("bytes", "bytes", measured=22936308, emulated=22936308, target="equal", passed=True)],
    "gpu": [Row("a GPU", "", note="no CUDA device: left out")],
}
HOST = {
    "date": "2026-01-02", "processor": "Some CPU", "cpus": 2, "memory_bytes": 2**33, "gpus": ["H200"],
    "kernel": "6.1", "load_average": 0.25, "versions": {"python": "3.11", "platform": "linux"},
}  # fmt: skip


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A bench of three sections, in the place of that of agents.sandbox."""
    parts = types.ModuleType("benchmarks.agents.sandbox.parts")
    parts.asked = []  # type: ignore[attr-defined]
    for name in ROWS:

        def rows(quick: bool, name: str = name) -> Iterator[Row]:
            parts.asked.append((name, quick))
            yield from ROWS[name]

        setattr(parts, f"{name}_rows", rows)
    monkeypatch.setitem(sys.modules, parts.__name__, parts)
    monkeypatch.setattr(run, "BENCHES", {"agents.sandbox": {"parts": "time memory gpu"}})
    monkeypatch.setattr(verb, "host_facts", lambda: HOST)
    return parts


@pytest.fixture
def invoke(fake: types.ModuleType) -> Callable[..., Any]:
    return lambda *words: CliRunner().invoke(verb.app, ["agents.sandbox", *words])


# --- the command --------------------------------------------------------------------------------------------


def test_the_table_shows_misses_and_what_was_left_out(invoke: Callable[..., Any], fake: Any) -> None:
    text = invoke("--quick").output
    for part in ("✗ <= 4%", "✓ equal", "5.00%", "22,936,308 B", "a GPU: no CUDA device: left out"):
        assert part in text
    assert "targets: 1 met, 1 missed (a job)" in text
    assert fake.asked == [("time", True), ("memory", True), ("gpu", True)]


def test_json_has_every_figure_by_its_kind_and_what_it_was_measured_on(invoke: Callable[..., Any]) -> None:
    report = json.loads(invoke("--json", "--only", "time").stdout)
    assert (report["capability"], report["quick"], report["host"]) == ("agents.sandbox", False, HOST)
    first, second = report["rows"]
    assert (first["measured"], first["emulated"], first["published"]) == (0.2, 0.19, None)
    assert first["error"] == pytest.approx(0.05) and first["passed"] is False
    assert (second["measured"], second["published"], second["unit"]) == (None, 3.0, "times")


def test_markdown_is_a_table_a_section(invoke: Callable[..., Any]) -> None:
    text = invoke("--markdown", "--quick").stdout
    assert text.startswith(
        "### `python -m benchmarks agents.sandbox --quick`\n\n2026-01-02: Some CPU, 2 CPUs, 8.00 GiB"
    )
    assert "8.00 GiB, H200, Linux 6.1" in text and "python 3.11." in text
    lines = text.splitlines()
    at = lines.index("**time**")
    assert lines[at + 2 : at + 6] == [
        "| name | measured | emulated | published | error | target |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| a job | 200.0 ms | 190.0 ms |  | 5.00% | ✗ &lt;= 4% |",
        "| a \\| pipe |  |  | 3 times |  |  |",
    ]
    assert "- a GPU: no CUDA device: left out" in lines and "- a job: three runs" in lines
    assert lines[-1] == "targets: 1 met, 1 missed (a job)"


def test_json_and_markdown_are_not_both(invoke: Callable[..., Any]) -> None:
    error = invoke("--markdown", "--json").exception
    assert isinstance(error, UserError) and "--json and --markdown" in str(error)


# --- rows ---------------------------------------------------------------------------------------------------


def test_sections_come_in_the_order_of_the_table(fake: Any) -> None:
    progress: list[tuple[str, float]] = []
    shown: list[list[Row]] = []
    rows = run.run(
        "agents.sandbox",
        ["memory", "time"],
        progress=lambda *at: progress.append(at),
        section_done=shown.append,
    )
    assert [row.section for row in rows] == ["time", "time", "memory"]
    assert [replace(row, section="", load=None) for row in rows] == ROWS["time"] + ROWS["memory"]
    assert shown == [rows[:2], rows[2:]]
    assert progress == [("time", 0.0), ("memory", 0.5)]


def test_an_unknown_name_or_section_is_refused(fake: Any) -> None:
    with pytest.raises(UserError, match=r"^--only 'tme' is no section; accepted are time, memory, gpu"):
        run.run("agents.sandbox", ["tme"])
    with pytest.raises(UserError, match=r"'agents' is unknown; accepted are agents\.sandbox"):
        run.run("agents")


def test_a_trace_goes_to_the_section_that_takes_one_and_to_no_other(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(fake, "time_rows", lambda quick, trace: asked.append((quick, trace)) or [])
    run.run("agents.sandbox", trace=Path("a"))
    run.run("agents.sandbox", ["time"], quick=True)
    assert asked == [(False, Path("a")), (True, None)]
    assert fake.asked == [("memory", False), ("gpu", False)]
    with pytest.raises(UserError, match=r"--trace a .* accepted with time"):
        run.run("agents.sandbox", ["memory"], trace=Path("a"))


def test_what_a_host_lacks_is_said_and_no_failure(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "time_rows", lambda quick: need("left out: no such device"))
    first, *others = run.run("agents.sandbox")
    assert (first.section, first.name, first.note) == ("time", "time", "left out: no such device")
    assert len(others) == 2
    need("")
    need(None)


@pytest.mark.parametrize("name", BENCHES)
def test_every_section_of_the_table_is_there(name: str) -> None:
    for module, sections in BENCHES[name].items():
        path = ROOT / "benchmarks" / name.replace(".", "/") / f"{module}.py"
        text = (path if module else path.parent.with_suffix(".py")).read_text()
        for section in sections.split():
            assert f"def {section.replace('-', '_')}_rows(" in text, (name, section)


def test_a_section_that_cannot_be_imported_does_not_lose_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "BENCHES", {"agents.sandbox": {"nowhere": "time"}})
    (row,) = run.run("agents.sandbox")
    assert row.name == "time (failed)" and "ModuleNotFoundError" in row.note


def test_rows_before_a_failure_are_kept_and_the_failure_is_told() -> None:
    def produce() -> Iterator[Row]:
        yield Row("first", "s", measured=1.0)
        raise ScriptError("the job failed\nbadly")

    first, second = guarded("memory", produce)
    assert first.name == "first"
    assert second.measured is None
    assert "the job failed" in second.note
    assert "\n" not in second.note


def test_the_error_is_against_what_was_measured_and_else_against_what_was_published() -> None:
    assert Row("n", "s", measured=2.0, emulated=1.5, published=100.0).error == 0.25
    assert Row("n", "s", emulated=90.0, published=100.0).error == pytest.approx(0.1)
    assert Row("n", "s", emulated=90.0).error is None
    assert Row("n", "bytes", measured=0.0, emulated=0.0).error == 0.0
    assert Row("n", "bytes", measured=0.0, emulated=1.0).error is None


@pytest.mark.parametrize(
    ("value", "unit", "goal", "passed"),
    [
        (0.059, "s", "<= 60 ms", True), (0.061, "s", "at most 60 ms", False), (0.95, "", ">= 95%", True),
        (3.0, "%", "≤ 3 %", True), (3.0, "x", "> 3 of it", False), (0.0, "found", "0", True),
        (1.0, "", "100 %", True), (2.1 * 2**30, "bytes", "<= 2 GiB", False),
        (3.5, "x", "at least 4 x", False), (11e6, "events/s", ">= 20 M/s", False),
    ],
)  # fmt: skip
def test_units_of_the_goal_are_the_rows(value: float, unit: str, goal: str, passed: bool) -> None:
    assert reached(value, goal, unit) is passed


def test_what_is_emulated_is_held_to_what_was_measured() -> None:
    assert figure("n", "B", 3.0, "equal", emulated=3.0).passed is True
    assert figure("n", "B", 3.0, "equal", emulated=3.1).passed is False
    assert figure("n", "s", 2.0, "within 15 %", emulated=2.2).passed is True
    assert figure("n", "s", 2.0, "within 5 % of it", emulated=2.2).passed is False


def test_of_several_figures_the_median_stands_with_its_span() -> None:
    row = figure("n", "s", (1.0, None, 4.0, 2.0), emulated=[3.0], note="why")
    assert (row.measured, row.emulated, row.note) == (2.0, 3.0, "median of 3, 1 s to 4 s; why")
    both = figure("n", "x", [1.0, 3.0], emulated=iter([2.0, 4.0]))
    assert both.note == "median of 2, 1 x to 3 x; emulated: median of 2, 2 x to 4 x"
    assert figure("n", "s", []).measured is None and figure("n", "s", [2.0]).note == ""


def test_what_is_not_judged_shows_its_goal_and_a_source_needs_a_figure() -> None:
    row = figure("n", "x", 3.0, ">= 2 x", judged=False, source="a paper")
    assert (row.target, row.passed, row.source) == (">= 2 x", None, "")
    assert figure("n", "x", 3.0, "about even", passed=True, published=2.0, source="a paper").passed is True
    assert figure("n", "x", 3.0, passed=True).passed is None
    with pytest.raises(ValueError, match="'soon' names no number"):
        figure("n", "s", 3.0, "soon")


@pytest.mark.parametrize(
    ("value", "unit", "words"),
    [
        (None, "s", ""), (0.0123, "s", "12.3 ms"), (62.0, "s", "62 s"), (3 * 2**30, "bytes", "3.00 GiB"),
        (1234567, "bytes", "1,234,567 B"), (0.5, "", "50.00%"), (2.5e6, "events/s", "2.5 M/s"),
        (12345.6, "times", "12,346 times"),
    ],
)  # fmt: skip
def test_figures(value: float | None, unit: str, words: str) -> None:
    assert format_value(value, unit) == words


# --- measuring ----------------------------------------------------------------------------------------------


def test_quantiles_are_values_that_were_measured() -> None:
    values = [3.0, 1.0, 2.0, 4.0]
    assert [measure.quantile(values, share) for share in (0.0, 0.25, 0.5, 0.95, 1.0)] == [1, 1, 2, 4, 4]
    assert math.isnan(measure.quantile([], 0.5))


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=50), st.floats(0, 1))
def test_a_quantile_is_the_least_that_so_many_do_not_exceed(values: list[float], share: float) -> None:
    quantile = measure.quantile(values, share)
    assert quantile in values
    assert sum(value <= quantile for value in values) >= share * len(values) - 1e-9
    assert sum(value < quantile for value in values) <= share * len(values)


def test_ratios_are_of_the_repeats_that_are_known() -> None:
    assert measure.ratios([6.0, None, 9.0], [2.0, 1.0, 3.0]) == [3.0, 3.0]


def test_arms_take_turns() -> None:
    order: list[str] = []
    arms = {name: lambda name=name: order.append(name) or len(order) for name in "abc"}  # type: ignore[misc]
    turns = measure.in_turn(arms, 3)
    assert order == list("abcbcacab")
    assert turns == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}


def test_a_scratch_folder_goes_with_all_in_it(tmp_path: Any) -> None:
    with pytest.raises(KeyboardInterrupt), measure.scratch(tmp_path) as folder:
        (folder / "deep" / "down").mkdir(parents=True)
        assert folder.parent == tmp_path
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


SECTION = """
import signal, sys, time
import benchmarks.__main__ as command
from benchmarks.harness import measure, run, rows

def job_rows(quick):
    with measure.scratch() as folder, measure.process_pool(1) as pool:
        pool.submit(signal.pause)
        print(folder, *pool._processes, flush=True)
        while True:  # a signal just before a pause without end would not end it
            time.sleep(0.01)

run.sections_of = lambda name: {"job": lambda: job_rows}
sys.argv[1:] = ["agents.sandbox"]
command.main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_unwinds_the_section_that_runs(number: signal.Signals) -> None:
    command = [sys.executable, "-c", SECTION]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            folder, worker = process.stdout.readline().split()
            assert Path(folder).is_dir()
            process.send_signal(number)
            assert process.communicate(timeout=PATIENCE)[1] == ""
        finally:
            process.kill()
    assert process.returncode == 128 + number
    assert not Path(folder).exists() and not Path(f"/proc/{worker}").exists()


def test_what_stands_in_brackets_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    def job_rows(quick: bool) -> Iterator[Row]:
        yield figure("in [edge]", "s", 1.0, note="see [data]")
        raise UserError("pip install 'windtunnel[edge]'")

    monkeypatch.setattr(run, "sections_of", lambda name: {"job": lambda: job_rows})
    said = CliRunner().invoke(verb.app, ["agents.sandbox"]).output
    assert "in [edge]" in said and "see [data]" in said and "pip install 'windtunnel[edge]'" in said


def test_what_a_host_is() -> None:
    host = json.loads(json.dumps(measure.host_facts()))
    assert host["cpus"] >= 1 and host["memory_bytes"] > 2**20 and host["processor"]
    assert show.markdown("a.b", [], host).startswith("### `python -m benchmarks a.b`")


# --- jobs ---------------------------------------------------------------------------------------------------


LOG: list[Event] = [
    {"kind": "decided", "generation": 1, "t": 0.0},
    {"kind": "step", "generation": 1, "step": 4, "t": 1.0, "loss": "a"},
    {"kind": "step", "generation": 1, "step": 5, "t": 1.5, "loss": "b"},
    {"kind": "decided", "generation": 2, "t": 2.0},
    {"kind": "step", "generation": 2, "step": 5, "t": 9.0, "loss": "c"},
]


def test_what_a_log_says_of_steps() -> None:
    assert jobs.losses(LOG) == {4: "a", 5: "c"}
    assert jobs.paces(LOG) == [(LOG[2], 0.5)]  # the first step of a generation has waited for more


def test_published_figures_have_a_source() -> None:
    """Every file of them, by the one reader."""
    files = sorted(ROOT.glob("benchmarks/*/*/published.json"))
    assert files
    for file in files:
        data = published(str(file))
        assert data.get("source") or all(row["source"] for row in data["jobs"])
