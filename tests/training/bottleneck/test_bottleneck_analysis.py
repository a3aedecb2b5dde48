"""What-ifs of an emulated job, by Python and by the command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support import quick
from windtunnel.base.errors import UserError
from windtunnel.cli.main import app
from windtunnel.training.bottleneck import Analysis, analyse

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
torch.cuda.set_device(device)
model = DistributedDataParallel(nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(512, 2048, device=device)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
CLUSTER = "v100:2x8,nic=ethernet-25"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("bottleneck")
    with pytest.MonkeyPatch.context() as patch, quick.captures():
        patch.setenv("WINDTUNNEL_HOME", str(folder))
        (folder / "train.py").write_text(SCRIPT)
        yield folder


@pytest.fixture(scope="module")
def analysis(home: Path) -> Analysis:
    return analyse(home / "train.py", cluster=CLUSTER)


@pytest.mark.xdist_group("bottleneck")
def test_a_network_that_holds_a_job_up_is_named_with_what_would_lift_it(analysis: Analysis) -> None:
    now = analysis.points[0]
    assert now.what == "as it is" and 0 < now.scaling < 0.9 and 0.5 < now.used <= 1
    assert analysis.verdict.network and "the network is the bottleneck" in analysis.sentence()
    assert analysis.needs == {"0.99": (None, None), "0.9": (None, None)}  # links inside a host take the rest
    curve = sorted((point.value, point.scaling) for point in analysis.points if point.what == "bandwidth")
    assert [scaling for _, scaling in curve] == sorted(scaling for _, scaling in curve)
    assert curve[-1][1] > 1.5 * now.scaling


@pytest.mark.xdist_group("bottleneck")
def test_compression_is_worth_what_a_faster_link_is_less_its_cost(analysis: Analysis) -> None:
    by = {(point.what, point.value): point for point in analysis.points}
    now = analysis.points[0]
    assert by["compression", 1.0].iteration == pytest.approx(now.iteration)
    doubled = by["bandwidth", 2 * now.value]  # 50 Gb/s
    assert by["compression", 2.0].iteration == pytest.approx(doubled.iteration)
    assert by["compression, with its cost", 2.0].iteration > by["compression", 2.0].iteration
    assert by["compute", 4.0].scaling < now.scaling


@pytest.mark.xdist_group("bottleneck")
def test_the_command_shows_it_and_takes_an_emulation_by_its_name(home: Path, analysis: Analysis) -> None:
    import windtunnel as wt

    wt.emulate(home / "train.py", cluster=CLUSTER, report=False)
    page = home / "page.html"
    shown = CliRunner().invoke(app, ["bottleneck", "--json", "--html", str(page), "last"])
    assert shown.exit_code == 0, shown.output
    answer = json.loads(shown.stdout)
    assert answer["source"] == "emulated" and answer["points"][0]["iteration"] == analysis.points[0].iteration
    assert "the network is the bottleneck" in page.read_text()


@pytest.mark.xdist_group("bottleneck")
def test_the_papers_rules_on_ones_own_job(home: Path) -> None:
    arguments = ["bottleneck", "--rules", "netai20", "--cluster", CLUSTER, "--json", str(home / "train.py")]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    row = json.loads(shown.stdout)["rows"][0]
    assert row["model"].endswith("train.py") and row["scaling"]["1"] < row["scaling"]["100"] <= 1


def test_what_is_wrong_is_said_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no network is used by one host"):
        analyse(__file__, cluster="v100:1x8")
    for words, sentence in (
        (["--rules", "paper"], "accepted are windtunnel, netai20"),
        (["--rules", "netai20", "--html", "x"], "--html go with the rules windtunnel"),
        (["--rules", "netai20", "--hosts", "4"], "--html go with the rules windtunnel"),
        ([], "a SCRIPT or a RUN is needed"),
        (["--hosts", "1,x", "--cluster", CLUSTER, __file__], "accepted are numbers from 2 up"),
        (["--cluster", CLUSTER, "no-such-run"], "no-such-run"),
        ([__file__], "--cluster is needed"),
    ):
        result = CliRunner().invoke(app, ["bottleneck", *words])
        assert isinstance(result.exception, UserError) and sentence in str(result.exception)
