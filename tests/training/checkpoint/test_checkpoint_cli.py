"""`windtunnel checkpoint`, on what a checkpointer wrote without a supervisor."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader
from typer.testing import CliRunner, Result

from support.small_disk import small_disk
from windtunnel.base.errors import HostError, ScriptError, UserError
from windtunnel.cli import main as cli
from windtunnel.training.checkpoint import PeerCheckpointer
from windtunnel.training.elastic import Job, run


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 to 3 of a vector that grows."""
    folder = tmp_path_factory.mktemp("stored")

    def train(job: Job) -> None:
        state = {"weight": torch.zeros(4096)}
        checkpointer = PeerCheckpointer(job, persist=str(folder), persist_every=1)
        for step in range(checkpointer.restore(state), 3):
            state["weight"] += torch.arange(4096.0) * (step + 1)
            checkpointer.step(step + 1, state)
        checkpointer.close()

    run(train, backend="gloo")
    return folder


@pytest.fixture
def url(written: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(written, tmp_path / "run"))


def ask(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["checkpoint", *map(str, arguments)], catch_exceptions=False)


def damage(url: Path) -> None:
    largest = max(url.rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def test_list_names_what_is_there(url: Path) -> None:
    rows = json.loads(ask("list", url, "--json").output)
    assert [row["step"] for row in rows if not row["bad"]] == [1, 2, 3]
    assert all(row["bytes"] >= 4096 * 4 for row in rows)
    newest = max((url / "steps").glob("*/complete"))
    newest.unlink()
    assert [bool(row["bad"]) for row in json.loads(ask("list", url, "--json").output)] == [False, False, True]
    assert ask("list", url).output.count("complete") >= 2


def test_verify_finds_a_flipped_bit(url: Path) -> None:
    assert "step 3" in ask("verify", url).output
    damage(url)
    with pytest.raises(ScriptError) as raised:
        ask("verify", url)
    assert "shard rank0 of step" in raised.value.details and "is damaged" in raised.value.details


def test_prune_keeps_the_newest(url: Path) -> None:
    assert "kept 2, 3" in ask("prune", url, "--keep", 2).output
    assert [row["step"] for row in json.loads(ask("list", url, "--json").output)] == [2, 3]
    assert "step 2" in ask("verify", url).output


def test_export_is_read_by_torch(url: Path, tmp_path: Path) -> None:
    ask("export", url, tmp_path / "dcp")
    (name,) = FileSystemReader(str(tmp_path / "dcp")).read_metadata().state_dict_metadata
    read = {name: torch.zeros(4096)}
    torch_dcp.load(read, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert torch.equal(read[name], torch.arange(4096.0) * 6)
    with pytest.raises(UserError, match="not an empty folder"):
        ask("export", url, tmp_path / "dcp")
    with pytest.raises(UserError, match="step 9 is not there; complete are 1, 2, 3"):
        ask("export", url, tmp_path / "other", "--step", 9)


@pytest.mark.root
def test_nothing_is_said_to_be_saved_that_is_not(url: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path, 16 << 20, "-b", "4096") as (_, point):
        with (point / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        with pytest.raises(HostError, match=r"the checkpoint in .*out is not whole"):
            ask("export", url, point / "out")


@pytest.mark.parametrize("verb", ["list", "verify", "prune", "export"])
def test_nothing_there_is_one_sentence(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    more = {"prune": ["--keep", "1"], "export": [str(tmp_path / "new")]}.get(verb, [])
    nowhere = str(tmp_path / "nowhere")
    monkeypatch.setattr(sys, "argv", ["windtunnel", "checkpoint", verb, nowhere, *more])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "no checkpoints are there" in capfd.readouterr().err
