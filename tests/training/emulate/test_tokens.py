"""Tokens of a step: those that several ranks look up together are counted once."""

from __future__ import annotations

from pathlib import Path

import pytest
from capturing import SCRIPTS, session
from rich.console import Console

from windtunnel.report.terminal import print_summary
from windtunnel.training.emulate.emulation import measure
from windtunnel.training.emulate.options import Options
from windtunnel.training.emulate.policy.classes import slice_world
from windtunnel.training.emulate.run import emulate


@pytest.mark.parametrize(
    ("kind", "replicas"), [("group", 2), ("mesh", 2), ("data", 4), ("frozen", 4), ("taught", 4)]
)
def test_tokens_are_counted_once_where_ranks_share_them(kind: str, replicas: int) -> None:
    with session("tokens.py", kind, cluster="h100-sxm:1x4") as one:
        classes = slice_world(one.capture, 4, [0])
    assert measure(classes).tokens == replicas * 3 * 10


def test_tokens_of_a_model_without_a_table_are_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    summary = emulate(SCRIPTS / "tokens.py", ["none"], "h100-sxm:1x2").summary
    shown = summary.to_json()
    assert shown["tokens_per_iteration"] is shown["tokens_per_second_per_device"] is None
    assert "tokens_per_iteration" not in shown["provenance"]
    with open(tmp_path / "text", "w") as file:
        print_summary(shown, Console(file=file))
    pages = (tmp_path / "text").read_text(), Path(summary.directory, "report.html").read_text()
    assert not any("tokens" in page.lower().replace("tokens.py", "") for page in pages)
    given = Options(tokens=7)
    assert emulate(SCRIPTS / "tokens.py", ["none"], "h100-sxm:1x2", given).summary.tokens_per_iteration == 7
