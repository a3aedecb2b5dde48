"""A job that really runs between namespaces, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support import quick
from windtunnel.base.errors import ScriptError, UserError
from windtunnel.cli.main import app
from windtunnel.linux import network
from windtunnel.training.bottleneck import analyse

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
known = [dist.get_rank()]
dist.broadcast_object_list(known, 1)  # before steps begin all is exchanged, also where nothing is sent
assert known == [1]
model = DistributedDataParallel(nn.Linear(256, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    model(torch.ones(4, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
GRADIENT = 4 * 256 * 257
RATE = 1.25e6


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    (tmp_path / "train.py").write_text(SCRIPT)
    with quick.captures(), quick.launches():
        yield tmp_path / "train.py"


@pytest.mark.root
@pytest.mark.xdist_group("bottleneck_live")
@pytest.mark.skipif(network.missing() is not None, reason=network.missing() or "")
def test_a_job_runs_for_real_and_is_put_beside_what_is_emulated(script: Path) -> None:
    words = ["bottleneck", "--live", "2", "--live-rates", "0.01", "--json", str(script), "12"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    answer = json.loads(shown.stdout)
    (row,) = answer["live"]
    assert (row["ranks"], row["rate"]) == (2, RATE)
    assert row["iteration"] > GRADIENT / RATE  # two ranks send as much as there is, each
    assert row["measured"] == pytest.approx(row["alone"] / row["iteration"])
    assert 0 < row["emulated"] < row["alone"] / (GRADIENT / RATE)


@pytest.mark.root
@pytest.mark.xdist_group("bottleneck_live")
@pytest.mark.skipif(network.missing() is not None, reason=network.missing() or "")
def test_a_program_that_ends_early_or_fails_here_says_so(script: Path) -> None:
    with pytest.raises(UserError, match="after 2 steps that count"):
        analyse(script, ["5"], cluster="cpu:2x1", live=[2], live_rates=[RATE])
    own = os.readlink("/proc/self/ns/net")  # where it is emulated; live ranks have others
    script.write_text(f'import os\nassert os.readlink("/proc/self/ns/net") == "{own}"\n' + SCRIPT)
    with pytest.raises(ScriptError, match="of 2 ended with an error") as raised:
        analyse(script, ["5"], cluster="cpu:2x1", live=[2], live_rates=[RATE])
    assert "AssertionError" in raised.value.details


def test_what_cannot_run_here_is_refused_first(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "missing", lambda: "network namespaces need root")
    for words, sentence in (
        (["--live", "2", str(script)], "--live: network namespaces need root"),
        (["--live", "1", str(script)], "accepted are numbers from 2 up"),
        (["--live", "2", "--live-rates", "0", str(script)], "--live-rates '0' is not accepted"),
        (["--live", "2", "--rules", "netai20"], "go with the rules windtunnel"),
    ):
        result = CliRunner().invoke(app, ["bottleneck", *words])
        assert isinstance(result.exception, UserError) and sentence in str(result.exception)
