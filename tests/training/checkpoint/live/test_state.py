"""The walk over a state and back: every kind of tensor and value, and what is refused."""

from __future__ import annotations

import collections
import json
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_world import Cluster, FakeJob
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from windtunnel.base.errors import UserError
from windtunnel.training.checkpoint import PeerCheckpointer
from windtunnel.training.checkpoint.live import objects
from windtunnel.training.checkpoint.live.layout import (
    ShardLayout,
    TensorEntry,
    Want,
    aligned,
    choose_moves,
    copy_overlap,
    view_of,
)


def through(folder: Path, saved: dict[str, Any], into: dict[str, Any], **options: Any) -> int:
    cluster = Cluster(folder, world=1)
    kept: dict[str, Any] = {}
    ck = PeerCheckpointer(FakeJob(cluster, 0, kept), **options)
    ck.step(4, saved)
    ck.flush()
    cluster.regroup(1)
    return PeerCheckpointer(FakeJob(cluster, 0, kept), **options).restore(into)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.rand(()))
        self.register_buffer("scratch", torch.rand(3), persistent=False)


def test_tensors_of_every_kind(folder: Path) -> None:
    tensors = {
        "bf16": torch.randn(3, 5).bfloat16(),
        "float8": torch.randn(8).to(torch.float8_e4m3fn),
        "complex": torch.randn(4, dtype=torch.complex64),
        "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
        "negative": torch.randn(4, dtype=torch.complex64).conj().imag,
        "scalar": torch.tensor(3.25),
        "empty": torch.empty(0, 3),
        "flags": torch.rand(9) > 0.5,
        "turned": torch.arange(12.0).view(3, 4).t(),
        "strided": torch.arange(20)[3::4],
        "spread": torch.ones(1).expand(4),
    }
    fresh = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in tensors.items()}
    assert through(folder, dict(tensors), fresh) == 5
    for name, value in tensors.items():
        assert torch.equal(
            fresh[name].float() if name == "float8" else fresh[name],
            value.float() if name == "float8" else value,
        ), name


def test_tied_weights_lie_once_and_stay_tied(folder: Path) -> None:
    saved, fresh = Tied(), Tied()
    assert through(folder, {"model": saved}, {"model": fresh}) == 5
    assert torch.equal(saved.head.weight, fresh.embedding.weight)
    assert fresh.head.weight is fresh.embedding.weight
    assert torch.equal(saved.scale, fresh.scale)
    layout = ShardLayout.of(_layout({"model": saved}))
    names = {e.name: e for e in layout.entries}
    assert names["model/head.weight"].offset == names["model/embedding.weight"].offset
    untied = Tied()
    untied.head.weight = nn.Parameter(torch.zeros(7, 4))
    assert through(folder, {"model": saved}, {"model": untied}) == 5
    assert torch.equal(untied.head.weight, saved.head.weight)


def _layout(state: dict[str, Any]) -> bytes:
    from windtunnel.training.checkpoint.live import snapshot
    from windtunnel.training.checkpoint.live.state import walk

    tensors, others = walk(state, rng=False)
    return snapshot.plan(tensors, tuple(others), 100, None, "rank0").blobs["rank0"]


def test_values_of_every_kind(folder: Path) -> None:
    generator, dice, numbers = torch.Generator().manual_seed(3), random.Random(3), np.random.default_rng(3)
    saved = {
        "cursor": {"epoch": 2, "seen": [1, 2, {"x": torch.ones(2)}], "name": "ä", "none": None},
        "counts": collections.Counter({"a": 2}),
        "array": np.arange(6).reshape(2, 3),
        "number": np.float32(1.5),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "generator": generator,
        "dice": dice,
        "numbers": numbers,
    }
    next_ones = [float(torch.rand(1, generator=generator.clone_state())), 0.0, 0.0]
    fresh: dict[str, Any] = {
        **dict.fromkeys(("counts", "array", "number", "size", "dtype")),
        "cursor": {"epoch": 0},
        "generator": torch.Generator(),
        "dice": random.Random(),
        "numbers": np.random.default_rng(),
    }
    cursor = fresh["cursor"]
    assert through(folder, saved, fresh) == 5
    assert cursor is fresh["cursor"] and cursor["seen"][:2] == [1, 2] and cursor["name"] == "ä"
    assert torch.equal(cursor["seen"][2]["x"], torch.ones(2))
    assert fresh["counts"] == saved["counts"] and np.array_equal(fresh["array"], saved["array"])
    assert (fresh["number"], fresh["size"], fresh["dtype"]) == (1.5, torch.Size([2, 3]), torch.bfloat16)
    assert float(torch.rand(1, generator=fresh["generator"])) == next_ones[0]
    assert fresh["dice"].random() == dice.random() and fresh["numbers"].random() == numbers.random()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), foreach=False),
        lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: torch.optim.LBFGS(p, max_iter=3),
        lambda p: torch.optim.AdamW([{"params": list(p)[:1], "lr": 0.5}, {"params": list(p)[1:]}]),
    ],
)
def test_optimizers_go_on_bit_identical(folder: Path, make: Any) -> None:
    def begin(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(4, 3)
        return {"model": model, "optimizer": make(list(model.parameters()))}

    def train(state: dict[str, Any]) -> None:
        x = torch.ones(2, 4)

        def loss() -> torch.Tensor:
            state["optimizer"].zero_grad()
            value = (state["model"](x) - 1).square().mean()
            value.backward()
            return value

        loss()
        state["optimizer"].step(loss)

    saved = begin(0)
    train(saved)
    fresh = begin(1)
    assert through(folder, saved, fresh) == 5
    for _ in range(3):
        train(saved)
        train(fresh)
    assert torch.equal(saved["model"].weight, fresh["model"].weight)


def test_state_that_appears_later_is_saved(folder: Path) -> None:
    cluster = Cluster(folder, world=1)
    kept: dict[str, Any] = {}
    ck = PeerCheckpointer(FakeJob(cluster, 0, kept))
    model = nn.Linear(3, 3)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "log": ["x"]}
    ck.step(0, state)
    model(torch.ones(1, 3)).sum().backward()
    state["optimizer"].step()  # its state exists from here on
    state["log"].extend("y" * 9000 for _ in range(2))  # and this outgrows its room
    ck.step(1, state)
    ck.flush()
    cluster.regroup(1)
    fresh_model = nn.Linear(3, 3)
    fresh = {"model": fresh_model, "optimizer": torch.optim.AdamW(fresh_model.parameters()), "log": []}
    assert PeerCheckpointer(FakeJob(cluster, 0, kept)).restore(fresh) == 2
    assert fresh["log"] == state["log"]
    assert float(fresh["optimizer"].state[fresh_model.weight]["step"]) == 1.0


class Foreign:
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.ones(2).to_sparse(), "x: a tensor of layout torch.sparse_coo"),
        (torch.empty(2, device="meta"), "x: a tensor on device meta"),
        (torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8), "x: a quantised tensor"),
        (lambda: 1, "state x: a function cannot be saved"),
        (Foreign(), r"state x: a .*Foreign is not accepted"),
        ({1: torch.ones(1), "1": torch.zeros(1)}, "state x/1: two tensors have this name"),
        ({"a/b": torch.ones(1), "a": {"b": torch.zeros(1)}}, "state x/a/b: two tensors have this name"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_name(folder: Path, value: Any, words: str) -> None:
    ck = PeerCheckpointer(FakeJob(Cluster(folder, 1), 0))
    with pytest.raises(UserError, match=words):
        ck.step(0, {"x": value})


def test_what_comes_into_a_state_later_is_refused_when_it_is_saved(folder: Path) -> None:
    """Else a failure would be the first to say so, and nothing could be gone on from."""
    cluster = Cluster(folder, 1)
    ck = PeerCheckpointer(FakeJob(cluster, 0))
    ck.step(0, {"x": 1})
    ck.flush()
    ck.step(1, {"x": Path("best.pt")})
    with pytest.raises(UserError, match=r"state x: a pathlib\.\w+ is not accepted"):
        ck.flush()
    assert cluster.committed == 0


@pytest.mark.parametrize(
    ("fresh", "words"),
    [
        ({"model": nn.Linear(3, 2)}, r"model/weight has shape \(2, 2\) in it; the state has \(2, 3\)"),
        ({"model": nn.Linear(2, 2).double()}, "model/weight is float32 in it; the state has float64"),
        ({"model": nn.Linear(2, 2, bias=False)}, "model/bias is in it, but model has no such tensor"),
        ({"model": nn.Sequential(nn.Linear(2, 2))}, "model/0.weight is not in it"),
        ({"model": nn.Linear(2, 2), "more": 3}, "more is not in it"),
    ],
)
def test_another_state_is_refused_by_name(folder: Path, fresh: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        through(folder, {"model": nn.Linear(2, 2)}, fresh)


def test_other_layouts_are_refused_by_name() -> None:
    blob = _layout({"model": nn.Linear(2, 2)})
    assert ShardLayout.of(blob).blob() == blob
    with pytest.raises(UserError, match="truncated"):
        ShardLayout.of(blob[:-20])
    for field, value, words in [
        ("version", 99, "layout 99; .* 3 is accepted"),
        ("format", "x", "x 3; "),
        ("tail", "2", "Layout.tail is '2', which is not accepted"),
        ("nbytes", 8, "entry model/weight is bytes"),
        ("entries", [["a"]], "not enough values"),
    ]:
        with pytest.raises(UserError, match=words):
            ShardLayout.of(json.dumps({**json.loads(blob), field: value}).encode())


def test_objects_run_nothing_when_they_are_read() -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return print, ("ran",)

    with pytest.raises(UserError, match=r"builtins\.print is not accepted"):
        objects.unpack(pickle.dumps({"x": Evil()}))
    with pytest.raises(UserError, match="not readable"):
        objects.unpack(b"junk")


def _cuts(size: int, parts: int) -> list[tuple[int, int]]:
    step = -(-size // parts)
    return [(min(i * step, size), min((i + 1) * step, size)) for i in range(parts)]


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    old=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    new=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    copies=st.integers(1, 2),
)
def test_resharding_puts_any_grid_together_from_any_other(
    shape: tuple[int, int], old: tuple[int, int], new: tuple[int, int], copies: int
) -> None:
    whole = torch.arange(float(shape[0] * shape[1])).view(shape)
    layouts, data = [], {}
    for i, (top, bottom) in enumerate(_cuts(shape[0], old[0])):
        for j, (left, right) in enumerate(_cuts(shape[1], old[1])):
            piece = whole[top:bottom, left:right].contiguous()
            for copy in range(copies):
                shard = f"rank{len(layouts)}"
                e = TensorEntry("t", "float32", tuple(piece.shape), 0, 4 * piece.numel(), shape, (top, left))
                layouts.append(ShardLayout(shard, aligned(e.nbytes), 0, (e,)))
                data[shard] = memoryview(bytearray(piece.numpy().tobytes().ljust(64, b"\0")))
                assert copy < copies and i + j >= 0
    for top, bottom in _cuts(shape[0], new[0]):
        for left, right in _cuts(shape[1], new[1]):
            want = Want("t", "float32", shape, (top, left), (bottom - top, right - left))
            moves = choose_moves(layouts, [want])
            target = torch.full(want.shape, -1.0)
            for shard, steps in moves.items():
                for step in steps:
                    copy_overlap(step, view_of(data[shard], step.source), target)
            assert torch.equal(target, whole[top:bottom, left:right])
    if old != (1, 1) and shape[0] > 1 and old[0] > 1:
        with pytest.raises(UserError, match="of t, from"):
            choose_moves(layouts[copies * old[1] :], [Want("t", "float32", shape, (0, 0), shape)])


def test_without_a_supervisor_and_storage_it_says_so_once(folder: Path) -> None:
    job = FakeJob(Cluster(folder, 1), 0)
    job.memory, job.supervised = None, False
    ck = PeerCheckpointer(job)
    assert ck.restore({"x": torch.zeros(1)}) == 0
    with pytest.warns(UserWarning, match="no checkpoints are made") as warned:
        for step in range(3):
            ck.step(step, {"x": torch.zeros(1)})
    assert len(warned) == 1


def test_options_come_from_the_environment_and_are_checked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDTUNNEL_CHECKPOINT", '{"copies": 3, "every": 3}')
    ck = PeerCheckpointer(FakeJob(Cluster(folder, 1), 0), copies=2)
    assert (ck.settings.copies, ck.settings.every) == (2, 3)
    for text, words in [
        ("{", "is not JSON"),
        ('{"copy": 2}', "unknown field copy"),
        ('{"every": 0}', "every"),
    ]:
        monkeypatch.setenv("WINDTUNNEL_CHECKPOINT", text)
        with pytest.raises(UserError, match=words):
            PeerCheckpointer(FakeJob(Cluster(folder, 1), 0))
