"""Plans that run: real processes over gloo, every kind of option, ranks that differ, a rank that dies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.ranks import run_ranks
from windtunnel.base.errors import UserError
from windtunnel.training.gradsync.files import read, write
from windtunnel.training.gradsync.live.script import main
from windtunnel.training.gradsync.model import SyncProfile
from windtunnel.training.gradsync.policy.plan import make_plan

HOOKED = Path(__file__).parent / "programs" / "hooked.py"
TRAINS = """
import torch, torch.distributed as dist

dist.init_process_group("gloo")
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
for _ in range(9):
    ddp(torch.ones(1, 8)).sum().backward()
"""
ODD = """
import torch, torch.distributed as dist

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = torch.nn.Embedding(9, 4, sparse=True), torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.table(x) if dist.get_rank() else torch.ones(1, 4)).sum()

dist.init_process_group("gloo")
ddp = torch.nn.parallel.DistributedDataParallel(Net(), find_unused_parameters=True)
for _ in range(9):
    ddp(torch.ones(1, dtype=torch.int64)).backward()
"""
SCRIPT = Path(__file__).parents[3] / "examples" / "train_resnet.py"


@pytest.mark.slow
def test_every_option_sends_what_backward_made() -> None:
    """On four ranks of two hosts: alike on all ranks, nothing lost, states that go on; NaN."""
    done = run_ranks([HOOKED, "options"], 4)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_ranks_that_differ_are_refused_before_the_first_step() -> None:
    done = run_ranks([HOOKED, "refused"], 4)
    assert done.returncode == 0, done.stderr[-3000:]
    words = done.stdout.splitlines()
    assert len(words) == 5
    assert all(line.startswith("gradsync apply: ") for line in words)
    for line, part in zip(
        words,
        (
            "rank 2 has plan",
            "the plan has no gradient",
            "for 5 ranks",
            "names a gradient twice",
            "the plan is for 7 parameters, the model has ",
        ),
        strict=True,
    ):
        assert part in line


@pytest.mark.slow
def test_a_rank_that_is_stopped_or_dies_ends_the_steps_of_all_others() -> None:
    """None waits for ever, and each says why; a later step does, too. One that is continued in time ends
    nothing, one that is continued too late ends as the others do."""
    done = run_ranks([HOOKED, "lost"], 4)
    assert done.returncode == 0, done.stderr[-3000:]
    words = done.stdout.splitlines()
    by_rank = {rank: [line for line in words if line.startswith(f"rank {rank}: ")] for rank in range(4)}
    assert [len(lines) for lines in by_rank.values()] == [4, 4, 4, 2], words
    stopped = [line for rank in range(3) for line in by_rank[rank][:2]]
    assert any("did not answer within 1 s" in line for line in stopped), words
    # DDP's own calls meet a loss first on some
    died = [line for rank in range(3) for line in by_rank[rank][2:]]
    assert sum("HostError: gradient exchange: of 4 ranks" in line for line in died) >= 2, words


@pytest.mark.slow
def test_a_script_is_measured_and_run_with_its_plan(tmp_path: Path) -> None:
    """As it stands: its profile has what it trains, also where it takes its end for a failure, and with a
    plan it trains as it did."""
    arguments = [str(SCRIPT), "--size", "debug", "--batch", "4", "--steps", "12"]
    module = ["-m", "windtunnel.training.gradsync.live.script"]
    file, fails = tmp_path / "profile.json", tmp_path / "fails.py"
    fails.write_text(
        "import runpy\ntry:\n"
        f"    runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        "except SystemExit as ended:\n    raise RuntimeError('the trainer failed') from ended\n"
    )
    done = run_ranks([*module, "profile", str(file), "fp16", str(fails), *arguments[1:]], 2)
    assert done.returncode == 0, done.stderr[-3000:]
    measured = read(file, SyncProfile)
    assert (len(measured.tensors), measured.network.world, measured.emulated) == (38, 2, "")
    assert measured.tensors[0].name.startswith("output.")
    assert sum(tensor.backward for tensor in measured.tensors) > 0 < measured.forward
    assert {fit.kind for fit in measured.network.collectives} == {
        "allreduce", "reduce_scatter", "allgather", "alltoall",
    }  # fmt: skip
    write(tmp_path / "plan.json", make_plan(measured))
    done = run_ranks([*module, "apply", str(tmp_path / "plan.json"), *arguments], 2)
    assert done.returncode == 0, done.stderr[-3000:]
    done = run_ranks([*module, "profile", str(file), "", *arguments[:-1], "3"], 2)
    assert done.returncode == 2
    assert "it ended before 8 steps" in done.stderr


@pytest.mark.slow
def test_a_profile_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    module = ["-m", "windtunnel.training.gradsync.live.script", "profile"]
    done = run_ranks([*module, str(tmp_path / "none" / "profile.json"), "fp16", str(script)], 1)
    assert done.returncode != 0
    assert "profile.json cannot be written" in done.stderr


@pytest.mark.slow
def test_a_table_that_one_rank_never_meets_is_refused_on_all(tmp_path: Path) -> None:
    """In place of a wait for it."""
    script = tmp_path / "train.py"
    script.write_text(ODD)
    module = ["-m", "windtunnel.training.gradsync.live.script", "profile"]
    done = run_ranks([*module, str(tmp_path / "profile.json"), "fp16", str(script)], 2)
    assert done.returncode == 2, done.stderr[-3000:]
    assert "the sparse gradient 'table.weight' was made on some ranks only" in done.stderr


def test_a_script_without_a_model_is_told(tmp_path: Path) -> None:
    script = tmp_path / "none.py"
    script.write_text("pass")
    init = torch.nn.parallel.DistributedDataParallel.__init__
    try:
        with pytest.raises(UserError, match="wraps no model in DistributedDataParallel"):
            main(["profile", "p.json", "", str(script)])
    finally:
        torch.nn.parallel.DistributedDataParallel.__init__ = init  # type: ignore[method-assign]
