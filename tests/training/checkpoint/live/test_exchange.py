"""Checkpoints to DCP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_dcp
from checkpoint_world import Cluster, FakeJob
from torch import nn

from windtunnel.training.checkpoint.live.state import walk
from windtunnel.training.checkpoint.live.whole import Whole, export_stored, store


def program(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    return {"model": model, "optimizer": optimizer, "cursor": {"at": seed}}


def stored(url: str, state: dict[str, Any], step: int) -> None:
    """``state`` as a job of one rank has it written to storage."""
    tensors, others = walk(state)
    store(
        FakeJob(Cluster(Path(url), 1), 0),
        url,
        step,
        {"rank0": Whole.packed("rank0", tensors, others)},
        1,
        "",
        1,
    )


def test_torch_reads_what_is_exported(tmp_path: Path) -> None:
    state = program(1)
    state["model"](torch.ones(2, 5)).sum().backward()
    state["optimizer"].step()
    stored(str(tmp_path / "a"), state, 6)
    names = export_stored(str(tmp_path / "a"), 6, tmp_path / "dcp")
    assert "model/weight" in names and "optimizer/state/model/weight/exp_avg" in names

    moment = state["optimizer"].state_dict()["state"][0]["exp_avg"]
    theirs = {"model/weight": torch.zeros(3, 5), "optimizer/state/model/weight/exp_avg": torch.zeros(3, 5)}
    torch_dcp.load(theirs, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert torch.equal(theirs["model/weight"], state["model"].weight)
    assert torch.equal(theirs["optimizer/state/model/weight/exp_avg"], moment)
