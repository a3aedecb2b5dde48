"""``windtunnel network torus plan``: the file has every path, and bad input ends in one sentence."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from windtunnel.base.errors import UserError
from windtunnel.cli.main import app
from windtunnel.network.torus.planning import plan


def test_the_verb_writes_every_path_and_prints_the_figures(tmp_path: Path) -> None:
    file = tmp_path / "paths.csv"
    words = ["network", "torus", "plan", "--dims", "3x3x3", "--fail", "0,0,0-0,0,1", "--out", str(file)]
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    assert (report["wavelengths"], report["lower_bound"], report["backup_wavelengths"]) == (11, 9, 2)
    assert report["failed_links"] == [[0, 1], [1, 0]] and report["rerouted"] == 18
    rows = list(csv.DictReader(file.open()))
    assert len(rows) == 27 * 26
    used = [
        (*hop, row["wavelength"])
        for row in rows
        for hop in zip(row["route"].split()[:-1], row["route"].split()[1:], strict=True)
    ]
    assert len(set(used)) == len(used)
    assert {("0", "1"), ("1", "0")}.isdisjoint(slot[:2] for slot in used)
    shown = CliRunner().invoke(app, words).output
    assert "9 (lower bound" not in shown and "rerouted          18 pairs" in shown


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dims": "3xa"}, "`dims`: '3xa' is not understood"),
        ({"dims": "3x-1"}, "`dims`: '3x-1' is not understood"),
        ({"dims": "3x3", "failed": ["0,4"]}, "'0,4' names node 0,4, which a torus of 3x3 has not"),
        ({"dims": "3x3", "failed": ["9"]}, "accepted are 0 to 8, or coordinates up to 2,2"),
        ({"dims": "3x3", "failed": ["0-1-2"]}, "'0-1-2' is not understood"),
        ({"dims": "3x3", "failed": ["0>x"]}, "'0>x' is not understood"),
        ({"dims": "3x3", "method": "fast"}, "'fast' is not for a torus of 3x3"),
        ({"dims": "3x3", "out": Path("plan.parquet")}, "plan.parquet is not understood, accepted are names"),
        (
            {"dims": "3x3", "out": Path("/nowhere/at/all.csv")},
            "/nowhere/at/all.csv cannot be written: No such",
        ),
    ],
)
def test_bad_input_is_one_sentence(given: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        plan(**given)
    assert message in str(caught.value)
