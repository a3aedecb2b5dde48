"""The comparison's own arithmetic, and its behaviour when a part fails; what it measures is not tested."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from windtunnel.base.errors import ScriptError, UserError
from windtunnel.cli import bench as verb
from windtunnel.training.emulate import bench
from windtunnel.training.emulate.bench.gpu import catalogue_name, gpu_rows
from windtunnel.training.emulate.bench.jobs import peak_bytes, step_order
from windtunnel.training.emulate.bench.rows import Row, guarded
from windtunnel.training.emulate.bench.tracked import Held
from windtunnel.training.emulate.graph import EVENT, EventKind, Operator, Slice


def slice_of(rows: list[tuple[EventKind, int, int]], steady: tuple[int, int]) -> Slice:
    events = np.zeros(len(rows), EVENT)
    for place, (kind, ref, value) in enumerate(rows):
        events[place]["kind"], events[place]["ref"], events[place]["value"] = kind, ref, value
    return Slice(
        0, 1, "cpu", [Operator("aten.mm.default", (), ())], [], [], [], events, [(0, steady[0]), steady], [""]
    )


def test_the_error_is_against_what_was_measured_and_else_against_what_was_published() -> None:
    assert Row("s", "n", "s", measured=2.0, emulated=1.5, published=100.0).error == 0.25
    assert Row("s", "n", "s", emulated=90.0, published=100.0).error == pytest.approx(0.1)
    assert Row("s", "n", "s", emulated=90.0).error is None
    assert Row("s", "n", "bytes", measured=0.0, emulated=0.0).error == 0.0
    assert Row("s", "n", "bytes", measured=0.0, emulated=1.0).error is None


def test_rows_before_a_failure_are_kept_and_the_failure_is_told() -> None:
    def produce() -> Iterator[Row]:
        yield Row("memory", "first", "s", measured=1.0)
        raise ScriptError("the job failed\nbadly")

    first, second = guarded("memory", produce)
    assert first.name == "first"
    assert second.measured is None
    assert "the job failed" in second.note
    assert "\n" not in second.note


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 1000)), min_size=2, max_size=40), st.data())
def test_peak_bytes_against_counting(program: list[tuple[bool, int]], data: st.DataObject) -> None:
    rows: list[tuple[EventKind, int, int]] = []
    alive: dict[int, int] = {}
    held = []
    for number, (born, size) in enumerate(program):
        if born or not alive:
            alive[number] = size
            rows.append((EventKind.ALLOC, number, size))
        else:
            gone = sorted(alive)[size % len(alive)]
            del alive[gone]
            rows.append((EventKind.FREE, gone, 0))
        held.append(sum(alive.values()))
    begin = data.draw(st.integers(1, len(rows) - 1))
    # What is held when the step begins counts, as it does in a real step.
    assert peak_bytes(slice_of(rows, (begin, len(rows)))) == max(held[begin - 1 :])


def test_the_order_of_the_steady_step_is_that_of_its_operators() -> None:
    rows = [(EventKind.OP, 0, 0), (EventKind.OP, 0, 0), (EventKind.ALLOC, 5, 8), (EventKind.OP, 0, 0)]
    assert step_order(slice_of(rows, (1, 4))) == [0, 0]


def test_a_step_begins_with_what_the_one_before_left() -> None:
    held = Held()
    kept, passing = held.alloc(100), held.alloc(50)
    held.free(passing)
    assert held.take_peak() == 150
    assert held.take_peak() == 100
    held.free(kept)
    assert (held.take_peak(), held.take_peak()) == (100, 0)


def test_an_unknown_section_is_refused() -> None:
    with pytest.raises(UserError, match="'speeed' is no section; accepted are time, memory"):
        bench.run(["speeed"])


def test_without_a_gpu_the_row_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (row,) = gpu_rows(True)
    assert row.note == "no CUDA device: left out"
    assert row.measured is None


def test_devices_are_found_by_the_name_that_pytorch_has_for_them() -> None:
    assert catalogue_name("NVIDIA H200") == "h200"
    assert catalogue_name("Voodoo 2") is None


def invoke(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    rows = [
        Row(
            "time", "a job", "s", measured=0.2, emulated=0.19, target="<= 4%", met=False, source="three runs"
        ),
        Row("memory", "bytes", "bytes", measured=22936308, emulated=22936308, target="equal", met=True),
        Row("gpu", "a GPU", "", note="no CUDA device: left out"),
    ]

    def run(*args: object, shown: Callable[[list[Row]], None], **kwargs: object) -> list[Row]:
        shown(rows)
        return rows

    monkeypatch.setattr(bench, "run", run)
    app = typer.Typer()
    app.callback()(lambda: None)
    verb.register(app)
    return CliRunner().invoke(app, ["bench", *arguments])


def test_the_table_shows_misses_and_what_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    text = invoke(monkeypatch, "training.emulate").output
    assert "✗ <= 4%" in text
    assert "✓ equal" in text
    assert "5.00%" in text
    assert "22,936,308 B" in text
    assert "a GPU: no CUDA device: left out" in text
    assert "targets: 1 met, 1 missed" in text


def test_json_has_the_fields_of_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = json.loads(invoke(monkeypatch, "training.emulate", "--json").output)
    assert len(rows) == 3
    assert all(
        {"name", "measured", "emulated", "error", "published", "source", "unit"} <= set(row) for row in rows
    )
    assert rows[0]["error"] == pytest.approx(0.05)


def test_an_unknown_capability_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    error = invoke(monkeypatch, "training.emulat").exception
    assert isinstance(error, UserError)
    assert "training.emulate" in str(error)
