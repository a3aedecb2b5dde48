"""What is wrong with input is told by place, and what breaks beneath a table loses nothing of it."""

from __future__ import annotations

import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from support.preloaded import Process
from windtunnel import HostError, UserError
from windtunnel.data.embeddings.live.bag import TieredEmbeddingBag

ADAGRAD = partial(torch.optim.Adagrad, lr=0.1)
IDS, ENDS = torch.tensor([3, 1, 3]), torch.tensor([0, 2])


def table(slow: str | Path = "memory", **options: Any) -> TieredEmbeddingBag:
    return TieredEmbeddingBag(
        20, 3, 5, slow=slow, name="user", optimizer=options.pop("optimizer", ADAGRAD), **options
    )


def plain(bag: TieredEmbeddingBag, **options: Any) -> torch.nn.EmbeddingBag:
    weight = bag.read(torch.arange(bag.rows))[:, : bag.dim].clone()
    return torch.nn.EmbeddingBag(bag.rows, bag.dim, mode="sum", sparse=True, _weight=weight, **options)


def train(module: torch.nn.Module, step: Any, ids: torch.Tensor) -> None:
    module(ids.view(-1, 2)).square().sum().backward()
    step()
    module.zero_grad()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.tensor([1, 20]), ENDS), r"'user': input\[1\] = 20 is no id; accepted are 0 to 19"),
        ((torch.tensor([1, 2, -1]), ENDS), r"'user': input\[2\] = -1 is no id"),
        ((torch.tensor([1.0]), ENDS), r"input is torch.float32; accepted are torch.int32, torch.int64"),
        ((IDS, ENDS.float()), r"offsets is torch.float32"),
        ((IDS, torch.tensor([0, 2, 1])), r"offsets\[2\] = 1 falls or is past the end"),
        ((IDS, torch.tensor([0, 4])), r"offsets\[1\] = 4 falls or is past the end; .* 0 to 3"),
        ((IDS, torch.tensor([1, 2])), r"offsets go from 1 to 2"),
        ((IDS,), r"input of shape \[3\] with offsets of shape None; accepted are \[n\] and \[bags\]"),
        ((IDS.view(1, 3), ENDS), r"offsets with input of shape \[1, 3\]"),
        ((IDS, ENDS, torch.ones(2)), r"per_sample_weights of shape \[2\], torch.float32; accepted is \[3\]"),
    ],
)
def test_wrong_input_is_told_by_its_place(arguments: tuple[torch.Tensor, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        table()(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": [0] * 20}, r"order of shape \[20\], int64, does not name every id of 0 to 19 once"),
        ({"order": [0, 1]}, r"order of shape \[2\]"),
        ({"mode": "max"}, r"mode 'max' is not known; accepted are sum, mean, none"),
        ({"init": torch.zeros(3, 3)}, r"init of shape \[3, 3\].*accepted is \[20, 3\]"),
        ({"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9)}, "option momentum = 0.9 would touch"),
        ({"optimizer": torch.optim.Adam}, "optimizer Adam is not exact on some rows; accepted are SGD"),
        ({"slow": "/nowhere/rows"}, r"slow tier /nowhere/rows: cannot be opened"),
    ],
)  # fmt: skip
def test_a_table_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        table(**options)


def test_a_slow_tier_is_of_one_table_and_never_another_file(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="would be overwritten"):
        table(tmp_path / "thesis.tex")
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    with closing(table(tmp_path / "rows")), pytest.raises(UserError, match="in use by another table"):
        table(tmp_path / "rows")
    assert not (tmp_path / "rows").exists()


def test_through_the_page_cache_where_it_cannot_be_passed_by(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("windtunnel.data.embeddings.live.slow.SECTOR", 100)  # which no file system takes
    with closing(table(tmp_path / "rows")) as bag:
        assert not getattr(bag.tiers.slow, "direct", True)
        reference, ids = plain(bag), torch.arange(20)
        optimizer = torch.optim.Adagrad(reference.parameters(), lr=0.1)
        train(reference, optimizer.step, ids)
        train(bag, bag.step, ids)
        assert torch.equal(bag.read(ids)[:, :3], reference.weight.detach())


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The kernel refuses this process what lies past ``size`` in any file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_fails_the_step_and_loses_nothing(tmp_path: Path) -> None:
    with (
        files_of_at_most(4096),
        pytest.raises(HostError, match=r"cannot be made .* large \(File too large; .* free"),
    ):
        table(tmp_path / "rows")
    rows = torch.randperm(4000, generator=torch.Generator().manual_seed(0))
    bag = TieredEmbeddingBag(4000, 3, 5, slow=tmp_path / "rows", optimizer=ADAGRAD)
    with closing(bag):
        reference = plain(bag)
        optimizer = torch.optim.Adagrad(reference.parameters(), lr=0.1)
        for ids in (rows[:1000], rows[500:1500]):
            train(reference, optimizer.step, ids)
        train(bag, bag.step, rows[:1000])
        with files_of_at_most(40_000):
            with pytest.raises(HostError, match=r"slow tier .*rows: .* blocks cannot be written"):
                train(bag, bag.step, rows[500:1500])
            assert torch.equal(bag.read(torch.arange(4000))[:, :3], reference.weight.detach())
            with pytest.raises(HostError):
                bag(rows[:2], ENDS)
            with pytest.raises(HostError, match=r"checkpoint .*table: cannot be written \(File too large\)"):
                bag.save(tmp_path / "table")
            with pytest.raises(HostError):
                bag.retier(rows, 2000)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["rows"]
        bag.retier(rows, 2000)
        for module, step in ((reference, optimizer.step), (bag, bag.step)):
            module.zero_grad()
            train(module, step, rows[:3000])
        assert torch.equal(bag.read(torch.arange(4000))[:, :3], reference.weight.detach())


def test_a_slow_tier_that_was_cut_is_told(tmp_path: Path) -> None:
    with closing(TieredEmbeddingBag(4000, 3, 5, slow=tmp_path / "rows", optimizer=ADAGRAD)) as bag:
        for ids in torch.arange(4000).flip(0).split(2000):
            train(bag, bag.step, ids)
        (tmp_path / "rows").open("r+b").truncate(8192)
        with pytest.raises(HostError, match=r"cannot be read \(it ends before byte .*, another has cut it\)"):
            bag(torch.tensor([3000]), ENDS[:1])


def test_a_damaged_checkpoint_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    bag, path = table(), tmp_path / "user.safetensors"
    train(bag, bag.step, torch.arange(20))
    bag.save(path)
    train(bag, bag.step, torch.arange(20))
    whole, before = path.read_bytes(), bag.read(torch.arange(20))
    for at, message in ((len(whole) - 5, "state.sum of ids 0 to 19 is damaged"), (3, "header is damaged"),
                     (whole.index(b'"steps"') + 20, "header is damaged")):  # fmt: skip
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(UserError, match=message):
            bag.load(path)
    for size, message in (
        (len(whole) - 1, "is damaged"),
        (100, "header is damaged"),
        (0, "header is damaged"),
    ):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match=message):
            bag.load(path)
    path.write_bytes(whole)
    for options, message in (
        ({"rows": 21}, "rows is 20; accepted is 21"),
        ({"dim": 4}, "dim is 3; accepted is 4"),
        ({"name": "item"}, "table is 'user'; accepted is 'item'"),
        ({"optimizer": torch.optim.SparseAdam}, "optimizer is 'Adagrad'; accepted is 'SparseAdam'"),
    ):
        other: Any = {"rows": 20, "dim": 3, "fast_rows": 5, "name": "user", "optimizer": ADAGRAD, **options}
        with pytest.raises(UserError, match=message):
            TieredEmbeddingBag(**other).load(path)
    assert torch.equal(bag.read(torch.arange(20)), before)
    with pytest.raises(UserError, match="cannot be read"):
        bag.load(tmp_path / "none")


KILLED = """
import itertools, sys, torch
from functools import partial
from windtunnel.data.embeddings.live.bag import TieredEmbeddingBag
bag = TieredEmbeddingBag(4000, 3, 5, slow=sys.argv[1], optimizer=partial(torch.optim.Adagrad, lr=0.1))
for step in itertools.count():
    if step == 2:
        bag.save(sys.argv[2])
        print("saved", flush=True)
    bag(torch.arange(4000).view(-1, 2)).square().sum().backward()
    bag.step()
"""


def test_killed_amid_steps_it_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    slow, saved = tmp_path / "rows", tmp_path / "table"
    child = Process(["-c", KILLED, slow, saved], stdout=subprocess.PIPE)
    with child.stdout:
        assert child.stdout.readline() == b"saved\n"
        child.kill()
    assert child.wait() == -signal.SIGKILL
    with closing(TieredEmbeddingBag(4000, 3, 9, slow=slow, optimizer=ADAGRAD)) as bag:
        ids, reference = torch.arange(4000), plain(bag)
        optimizer = torch.optim.Adagrad(reference.parameters(), lr=0.1)
        bag.load(saved)
        for _ in range(2):
            train(reference, optimizer.step, ids)
        assert torch.equal(bag.read(ids)[:, :3], reference.weight.detach())
        train(reference, optimizer.step, ids)
        train(bag, bag.step, ids)
        assert torch.equal(bag.read(ids)[:, :3], reference.weight.detach())
