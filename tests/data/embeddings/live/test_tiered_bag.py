"""A table in two tiers is one table: bits of forward, gradients and steps, whatever lies where."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel import UserError
from windtunnel.data.embeddings.files import read_statistics, write_statistics
from windtunnel.data.embeddings.live.bag import TieredEmbeddingBag, TieredOptimizer
from windtunnel.data.embeddings.live.build import build
from windtunnel.data.embeddings.live.ids import uniform
from windtunnel.data.embeddings.live.optim import RowWiseAdagrad, RowWiseAdam
from windtunnel.data.embeddings.model import MemoryTier
from windtunnel.data.embeddings.policy import PlacementRequest, decide
from windtunnel.data.embeddings.synthetic import order as order_of
from windtunnel.data.embeddings.synthetic import tables as tables_named

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.01, initial_accumulator_value=0.1),
    "adam": partial(torch.optim.SparseAdam, lr=0.1),
    "row-wise adagrad": partial(RowWiseAdagrad, lr=0.1),
    "row-wise adam": partial(RowWiseAdam, lr=0.1),
}


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    with torch.sparse.check_sparse_tensor_invariants(False):
        yield


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 60), dim=st.sampled_from([1, 3, 8, 17]),
    fast=st.floats(0, 1), mode=st.sampled_from(["sum", "mean", "none"]),
    rule=st.sampled_from(sorted(OPTIMIZERS)),
    file=st.booleans(), passes=st.lists(st.integers(0, 3), min_size=1, max_size=4), weighted=st.booleans(),
    last=st.booleans(), retier=st.booleans(),
)  # fmt: skip
def test_equal_to_one_table(
    seed: int, rows: int, dim: int, fast: float, mode: Any, rule: str, file: bool, passes: list[int],
    weighted: bool, last: bool, retier: bool,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    weight = torch.from_numpy(rng.standard_normal((rows, dim), np.float32))
    if mode == "none":
        plain: Any = torch.nn.Embedding(rows, dim, sparse=True, _weight=weight.clone())
    else:
        plain = torch.nn.EmbeddingBag(
            rows, dim, mode=mode, sparse=True, _weight=weight.clone(), include_last_offset=last
        )
    reference = OPTIMIZERS[rule](plain.parameters())
    with TemporaryDirectory() as folder:
        slow = Path(folder) / "rows" if file else "memory"
        bag = TieredEmbeddingBag(
            rows, dim, int(fast * rows), order=rng.permutation(rows), slow=slow, mode=mode,
            optimizer=OPTIMIZERS[rule], init=weight, include_last_offset=last,
        )  # fmt: skip
        with closing(bag):
            optimizer = TieredOptimizer(bag)
            for count in passes:
                for _ in range(count):
                    ids = torch.from_numpy(rng.integers(0, rows, int(rng.integers(0, 50))))
                    ends = np.sort(rng.integers(0, len(ids) + 1, 5))
                    ends[0], ends[-1] = 0, len(ids) if last else ends[-1]
                    arguments: tuple[Any, ...] = () if mode == "none" else (torch.from_numpy(ends),)
                    if weighted and mode == "sum":
                        arguments += (
                            torch.rand(len(ids), generator=torch.Generator().manual_seed(seed % 99)),
                        )
                    with torch.no_grad():
                        bag(torch.from_numpy(rng.integers(0, rows, (2, 3))))
                    expected, given = plain(ids, *arguments), bag(ids, *arguments)
                    assert torch.equal(expected, given)
                    wanted = torch.from_numpy(rng.standard_normal(expected.shape, np.float32))
                    (expected * wanted).sum().backward()
                    (given * wanted).sum().backward()
                reference.step()
                optimizer.step()
                reference.zero_grad()
                optimizer.zero_grad()
                if retier:
                    bag.retier(rng.permutation(rows), int(rng.integers(0, rows + 1)))
            records = bag.read(torch.arange(rows))
            assert torch.equal(records[:, :dim], plain.weight.detach())
            state = reference.state[plain.weight]
            kept = [state[name] for name in bag.rule.widths if name in state] if bag.rule else []
            if kept:
                assert torch.equal(records[:, dim:], torch.cat(kept, 1))


def test_a_stock_table_with_dense_gradients_is_equal_to_rounding() -> None:
    """Torch sums dense gradients in another order: the bits are those of ``sparse=True`` only."""
    torch.manual_seed(0)
    rng, weight, make = np.random.default_rng(0), torch.randn(200, 8), partial(torch.optim.Adagrad, lr=0.1)
    plain = torch.nn.EmbeddingBag(200, 8, mode="sum", _weight=weight.clone())
    bag = TieredEmbeddingBag(200, 8, 50, order=rng.permutation(200), init=weight, optimizer=make)
    optimizers = make(list(plain.parameters())), TieredOptimizer(bag)
    for step in range(4):
        ids = torch.from_numpy(rng.zipf(1.3, (64, 20)) % 200)
        expected, given = plain(ids), bag(ids)
        assert step or torch.equal(expected, given)
        torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)
        wanted = torch.from_numpy(rng.standard_normal(expected.shape, np.float32))
        for output, optimizer in zip((expected, given), optimizers, strict=True):
            (output * wanted).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    rows = bag.read(torch.arange(200))[:, :8]
    torch.testing.assert_close(rows, plain.weight.detach(), rtol=1e-5, atol=1e-5)


class Click(torch.nn.Module):
    """Two tables, dense features, a top: a small DLRM."""

    def __init__(self, tables: list[torch.nn.Module]) -> None:
        super().__init__()
        self.tables = torch.nn.ModuleList(tables)
        self.top = torch.nn.Linear(8, 1)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.top(
            torch.cat([table(ids) for table, ids in zip(self.tables, (left, right), strict=True)], 1)
        )


def test_a_model_trains_as_with_plain_tables_through_a_move_and_a_checkpoint(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights, make = [torch.randn(100, 4), torch.randn(30, 4)], partial(torch.optim.Adagrad, lr=0.1)
    data = torch.utils.data.TensorDataset(
        torch.randint(0, 100, (160, 3)), torch.randint(0, 30, (160, 2)), torch.rand(160, 1)
    )

    def tiered(fast: int) -> list[torch.nn.Module]:
        return [
            TieredEmbeddingBag(
                len(weight), 4, fast, slow=tmp_path / f"{fast}.{at}", init=weight, optimizer=make
            )
            for at, weight in enumerate(weights)
        ]

    plain = Click(
        [
            torch.nn.EmbeddingBag.from_pretrained(weight.clone(), False, mode="sum", sparse=True)
            for weight in weights
        ]
    )
    ours, other = Click(tiered(10)), Click(tiered(3))
    ours.top.load_state_dict(plain.top.state_dict())
    sparse: torch.optim.Optimizer = make(list(plain.tables.parameters()))
    optimizers = [TieredOptimizer(ours), torch.optim.Adam(ours.parameters())]
    references = [sparse, torch.optim.Adam(plain.top.parameters())]
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5) for optimizer in (sparse, optimizers[0])]
    for number, (left, right, label) in enumerate(torch.utils.data.DataLoader(data, batch_size=8)):
        if number == 10:  # another split takes over, by a state dict
            assert all(key.startswith(("tables.", "top.")) for key in ours.state_dict())
            other.load_state_dict(ours.state_dict())
            dense = torch.optim.Adam(other.parameters())
            dense.load_state_dict(optimizers[1].state_dict())
            handed = TieredOptimizer(other)
            handed.load_state_dict(optimizers[0].state_dict())
            schedules[1].optimizer = handed
            ours, optimizers = other, [handed, dense]
        losses = []
        for model, steps in ((plain, references), (ours, optimizers)):
            loss = torch.nn.functional.mse_loss(model(left, right), label)
            loss.backward()
            losses.append(loss.detach())
            for optimizer in steps:
                optimizer.step()
                optimizer.zero_grad()
        assert torch.equal(*losses)
        for schedule in schedules:
            schedule.step()
    for at, weight in enumerate(plain.tables.parameters()):
        assert torch.equal(ours.tables[at].get_extra_state()["weight"], weight)


def test_saved_as_one_table_that_any_split_and_safetensors_read(tmp_path: Path) -> None:
    make, path = partial(RowWiseAdam, lr=0.1), tmp_path / "user"
    first = TieredEmbeddingBag(
        20_000, 3, 700, order=np.random.default_rng(0).permutation(20_000), optimizer=make
    )
    second = TieredEmbeddingBag(20_000, 3, 20_000, optimizer=make)
    frozen = TieredEmbeddingBag(20_000, 3, 9_000)
    for ids in torch.arange(20_000).view(-1, 2)[:600].split(200):
        first(ids).square().sum().backward()
        first.step()
    first.save(path)
    second.load(path)
    frozen.load(path)
    everything = torch.arange(20_000)
    assert torch.equal(first.read(everything), second.read(everything))
    assert torch.equal(first.read(everything)[:, :3], frozen.read(everything))
    assert not frozen(everything[None]).requires_grad
    for bag in (first, second):
        bag(torch.tensor([[7, 19_999]])).sum().backward()
        bag.step()
    assert torch.equal(first.read(everything), second.read(everything))
    tensors = pytest.importorskip("safetensors.torch").load_file(path)
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == {
        "weight": [20_000, 3], "state.exp_avg": [20_000, 3], "state.exp_avg_sq": [20_000, 1],
    }  # fmt: skip
    assert torch.equal(tensors["weight"], frozen.read(everything))


def test_as_a_module_it_moves_by_its_rules() -> None:
    bag = TieredEmbeddingBag(20, 3, 5, name="user", optimizer=OPTIMIZERS["sgd"])
    with torch.autocast("cpu", torch.bfloat16):
        assert bag(torch.tensor([[1, 19]])).dtype == torch.float32
    assert bag.to("cpu").float().eval() is bag
    with pytest.raises(UserError, match=r"'user': rows cannot become torch.float16 on cpu"):
        torch.nn.Sequential(bag).half()
    with pytest.raises(UserError, match="not copied or pickled"):
        deepcopy(bag)
    assert "20 x 3, 5 fast rows on cpu" in repr(bag)
    bag(torch.tensor([[1, 19], [1, 2]])).sum().backward()
    gradient = bag.grad
    assert gradient is not None
    assert gradient.to_dense().sum(1)[[1, 2, 19]].tolist() == [6, 3, 3]
    bag.zero_grad()
    assert bag.grad is None


def test_row_wise_adagrad_is_fbgemms_rule() -> None:
    ops = pytest.importorskip(
        "fbgemm_gpu.split_table_batched_embeddings_ops_training", reason="no FBGEMM here"
    )
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(50, 8, generator=generator)
    theirs = ops.SplitTableBatchedEmbeddingBagsCodegen(
        [(50, 8, ops.EmbeddingLocation.HOST, ops.ComputeDevice.CPU)], learning_rate=0.1, eps=1e-8,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    )  # fmt: skip
    theirs.split_embedding_weights()[0].copy_(weight)
    ours = TieredEmbeddingBag(
        50, 8, 10, init=weight, optimizer=OPTIMIZERS["row-wise adagrad"], include_last_offset=True
    )
    for _ in range(5):
        ids, ends = torch.randint(0, 50, (30,), generator=generator), torch.tensor([0, 10, 10, 30])
        for module in (theirs, ours):
            module(ids, ends).square().sum().backward()
        ours.step()
    torch.testing.assert_close(ours.read(torch.arange(50))[:, :8], theirs.split_embedding_weights()[0])


def test_a_pass_without_a_step_keeps_what_its_gradient_needs() -> None:
    """The rows of a first pass are still there when a second one has asked for more of the slow tier."""
    bag = TieredEmbeddingBag(70_000, 2, 1, optimizer=OPTIMIZERS["sgd"])
    scale = torch.ones(1, 2, requires_grad=True)
    ids = torch.tensor([[5, 6]])
    first = bag(ids, None, scale)
    bag(torch.arange(1_000, 70_000)[None])
    expected = bag.read(ids[0]).sum(1)
    first.sum().backward()
    assert scale.grad is not None
    assert torch.equal(scale.grad[0], expected)


def test_a_plan_becomes_modules_of_its_devices(tmp_path: Path) -> None:
    """All devices together look up what whole tables would, columns of a table side by side."""
    tables = tuple(
        replace(table, state_bytes=4, name=f"sparse/{table.name}")
        for table in tables_named("small", scale=0.02)
    )
    orders = {table.name: order_of(table.rows, at) for at, table in enumerate(tables)}
    write_statistics(tmp_path / "statistics", tables, orders)
    known = read_statistics(tmp_path / "statistics")
    size = sum(table.total_bytes for table in tables)
    plan = decide(PlacementRequest(tables, 2, MemoryTier(size / 10, 1e9), MemoryTier(size, 1e8), 64))
    assert any(shard.last - shard.first < 64 for shard in plan.shards)
    (tmp_path / "slow").mkdir()
    modules = {}
    for device in range(2):
        bags = build(plan, known, device, slow=tmp_path / "slow", optimizer=OPTIMIZERS["row-wise adagrad"])
        assert sum(bag.fast_rows * (bag.dim + 1) * 4 for bag in bags.values()) <= size / 10
        modules |= bags
    for table in tables:
        shards = sorted(
            (shard for shard in plan.shards if shard.table == table.name), key=lambda shard: shard.first
        )
        ids = torch.arange(table.rows).view(1, -1)
        names = [name if name in modules else f"{name}[{a}:{b}]" for name, a, b in
                 ((shard.table, shard.first, shard.last) for shard in shards)]  # fmt: skip
        whole = uniform(ids[0], 64, table.rows**-0.5)
        assert torch.equal(torch.cat([modules[name].read(ids[0])[:, :-1] for name in names], 1), whole)
        assert np.array_equal(np.sort(orders[table.name]), ids[0].numpy())
        hottest = torch.from_numpy(orders[table.name][:1].astype(np.int64))
        assert int(modules[names[0]]._ids.ranks(hottest)) == 0
    with pytest.raises(UserError, match="there is no device 2; accepted are 0 to 1"):
        build(plan, known, 2)
    other = replace(known, tables=tables[:1])
    with pytest.raises(UserError, match="is of no table of"):
        _ = [build(plan, other, device) for device in range(2)]
    for bag in modules.values():
        bag.close()
