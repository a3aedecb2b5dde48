"""The verb: what it prints, and its exit status."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from windtunnel.base.errors import UserError
from windtunnel.cli.cluster import group
from windtunnel.cluster.draw import WIDTH, figures, picture, si
from windtunnel.cluster.load import load_cluster

SOURCE = str(Path(__file__).parents[2] / "src")
app = typer.Typer()
app.add_typer(group, name="cluster")
app.callback()(lambda: None)
runner = CliRunner()


def run(*arguments: str) -> str:
    result = runner.invoke(app, ["cluster", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_list_names_everything() -> None:
    text = run("list")
    for word in (
        "h100-96",
        "mi300x",
        "nvlink-5",
        "roce-800",
        "ethernet-100",
        "rail-optimised",
        "torus",
        "measured",
    ):
        assert word in text
    data = json.loads(run("list", "--json"))
    assert data["hosts"]["b200"]["host"]["device"]["peak_flops"]["bfloat16"] == 2.25e15
    assert data["links"]["ib-400"]["bandwidth"] == 50e9


def test_show_draws_and_cites() -> None:
    text = run("show", "h100-sxm:512x8,price=2")
    for words in (
        "4,096 x h100-sxm",
        "core switches",
        "spine switches",
        "16 x 8 leaf switches",
        "NVLS",
        "datasheet",
    ):
        assert words in text


def test_show_tells_an_oversubscription_without_effect() -> None:
    assert "has no effect" in run("show", "h100-sxm:16x8,oversubscription=4")
    assert "has no effect" not in run("show", "h100-sxm:64x8,oversubscription=4")


def test_nothing_here_needs_torch() -> None:
    check = "import sys, windtunnel.cli.cluster; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, env=os.environ | {"PYTHONPATH": SOURCE})


def test_show_json_is_plain() -> None:
    data = json.loads(run("show", "h100-sxm:16x8", "--json"))
    assert (data["world_size"], data["hosts"], data["host"]["devices"]) == (128, 16, 8)
    assert data["host"]["device"]["sources"]["memory_bandwidth"]
    assert data["groups"]["all ranks"]["tier"] == 1


def test_validate(tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text("base: t4:2x4\n")
    assert run("validate", str(file)).strip() == f"{file}: OK, 2 x 4 t4, single-switch, 800 ns a hop"
    file.write_text("base: t4:2x5\n")
    with pytest.raises(UserError, match="5 devices"):
        run("validate", str(file))


@pytest.mark.parametrize(
    "name",
    [
        "t4:1x1", "l4:4x8", "v100:40x8", "h100-sxm:1024x8", "gb200:36x4", "gb200:4x72", "cpu:2x4",
        "h100-sxm:256x8,topology=fat-tree-3,oversubscription=3", "h100-sxm:60x8,topology=torus,dims=3x4x5",
        "h100-sxm:12x8,topology=torus,dims=12",
    ],
)  # fmt: skip
def test_pictures_fit_the_terminal(name: str) -> None:
    lines = picture(load_cluster(name)).splitlines()
    assert lines[0].startswith(f"{name}: ")
    assert all(len(line) <= WIDTH for line in lines[1:])
    boxed = [line for line in lines[1:] if line[0] in "┌│└"]
    assert {len(line) for line in boxed} == {WIDTH}
    assert all(value and source for _, value, source in figures(load_cluster(name)))


def test_si() -> None:
    assert [si(3.35e12, "B/s"), si(600e-9, "s"), si(1, "s"), si(0, "W"), si(1000, "W")] == [
        "3.35 TB/s", "600 ns", "1 s", "0 W", "1 kW",
    ]  # fmt: skip


def test_the_page_in_docs_is_true(tmp_path: Path) -> None:
    """Every example of docs/cluster.md loads."""
    page = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
    files = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    assert files
    for text in files:
        (tmp_path / "example.yaml").write_text(text)
        load_cluster(str(tmp_path / "example.yaml"))
    names = re.findall(r"windtunnel cluster show (\S+:\S+)", page)
    assert names
    for name in names:
        load_cluster(name)
