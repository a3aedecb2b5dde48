"""A rank of 4: what `ShardedEmbedding` does is held against one table in this process."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional

from windtunnel.base.errors import HostError, UserError
from windtunnel.data.embeddings import policy, traffic
from windtunnel.data.embeddings.live import sharded
from windtunnel.data.embeddings.live.bag import TieredEmbeddingBag
from windtunnel.data.embeddings.live.optim import RowWiseAdagrad, RowWiseAdam
from windtunnel.data.embeddings.live.sharded import ShardedEmbedding, exchange
from windtunnel.data.embeddings.model import EmbeddingTable, Replicas
from windtunnel.data.embeddings.policy import Replication, ReplicationRequest
from windtunnel.store.eventlog import EventLog

TABLES = (
    EmbeddingTable("a", 41, 3, pooling=12, sequence=True),
    EmbeddingTable("b", 7, 8, pooling=3),
    EmbeddingTable("c", 150, 5, pooling=4, sequence=True, state_bytes=20),
)
SEQUENCES = {table.name for table in TABLES if table.sequence}
BAGS = 4
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1),
    "adam": partial(torch.optim.SparseAdam, lr=0.1),
    "row-wise adagrad": partial(RowWiseAdagrad, lr=0.1),
    "row-wise adam": partial(RowWiseAdam, lr=0.1),
}
Batch = dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]


class Reference:
    """Each table in one process, of torch alone, with the ranks' gradients accumulated in turn."""

    def __init__(self, optimizer: str) -> None:
        rng = np.random.default_rng(5)
        self.weights = {
            table.name: torch.nn.Parameter(
                torch.from_numpy(rng.standard_normal((table.rows, table.dim), np.float32))
            )
            for table in TABLES
        }
        self.optimizers = {name: OPTIMIZERS[optimizer]([weight]) for name, weight in self.weights.items()}
        self.begun = {name: weight.detach().clone() for name, weight in self.weights.items()}

    def step(self, batches: list[Batch]) -> list[dict[str, torch.Tensor]]:
        outputs = []
        for batch in batches:
            given = {}
            for name, (ids, offsets) in batch.items():
                # rows, and then their sums: torch's own pooling of a table sums gradients in another order
                given[name] = functional.embedding(torch.from_numpy(ids), self.weights[name])
                if name not in SEQUENCES:
                    every, ends = torch.arange(len(ids)), torch.from_numpy(offsets)
                    given[name] = functional.embedding_bag(every, given[name], ends, mode="sum")
            loss(given).backward()
            outputs.append({name: tensor.detach().clone() for name, tensor in given.items()})
        for name, optimizer in self.optimizers.items():
            weight = self.weights[name]
            if weight.grad is not None:
                rows = torch.from_numpy(
                    np.unique(np.concatenate([batch[name][0] for batch in batches if name in batch]))
                )
                weight.grad = torch.sparse_coo_tensor(rows[None], weight.grad[rows], weight.shape).coalesce()
            optimizer.step()
            optimizer.zero_grad()
        return outputs

    def records(self, name: str) -> torch.Tensor:
        """Weights and state of every row."""
        state = self.optimizers[name].state[self.weights[name]]
        parts = [tensor for key, tensor in state.items() if key != "step"]
        return torch.cat([self.weights[name].detach(), *parts], 1)


def loss(outputs: dict[str, torch.Tensor]) -> torch.Tensor:
    parts = [(output * output.detach().cos()).sum() for output in outputs.values()]
    return torch.stack([torch.zeros((), requires_grad=True), *parts]).sum()


def drawn(rng: np.random.Generator, orders: dict[str, Any]) -> Batch:
    """One rank's; sometimes a table is absent or empty, and some rows are asked for again and again."""
    batch: Batch = {}
    for table in TABLES:
        if rng.random() < 0.2:
            continue
        lengths = rng.integers(0, 2 * int(table.pooling), BAGS) * (rng.random() > 0.2)
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        ranks = (rng.random(offsets[-1]) ** 3 * table.rows).astype(np.int64)
        batch[table.name] = orders[table.name][ranks], offsets[:-1]
    return batch


def asked(batch: Batch) -> dict[str, Any]:
    tensors = {name: tuple(map(torch.from_numpy, lookup)) for name, lookup in batch.items()}
    return {name: lookup[0] if name in SEQUENCES else lookup for name, lookup in tensors.items()}


def cuts(request: ReplicationRequest) -> Replication:
    """Drawn from the observation alone, so on all ranks alike."""
    rng = np.random.default_rng(int(request.samples))
    replicas = []
    for table in request.tables:
        hot, warm = sorted(rng.integers(0, table.rows + 1, 2).tolist())
        replicas.append(Replicas(table.name, hot, warm))
    return Replication(tuple(replicas))


def predicted(
    request: ReplicationRequest, module: ShardedEmbedding, batches: list[Batch], orders: dict[str, Any]
) -> Any:
    inverse = {name: np.argsort(order) for name, order in orders.items()}
    ranks = [{name: inverse[name][ids] for name, (ids, _) in batch.items()} for batch in batches]
    offsets = [{name: ends for name, (_, ends) in batch.items()} for batch in batches]
    return traffic.exact(request, module.decision, ranks, offsets)


def check(
    folder: Path, number: int, devices: int, distinct: bool, optimizer: str, slow: bool, sums: bool = False
) -> None:
    rank, rng = dist.get_rank(), np.random.default_rng(number)
    orders = {table.name: rng.permutation(table.rows) for table in TABLES}
    reference = Reference(optimizer)
    request = exchange(TABLES, number + 1, intra=1e9, inter=1e8, devices=devices, distinct=distinct)
    request = replace(request, partial_sums=sums)
    close = partial(torch.allclose, rtol=1e-3, atol=1e-5)
    same = {table.name: close if request.sums(table) else torch.equal for table in TABLES}
    module = ShardedEmbedding(
        request, orders=orders, optimizer=OPTIMIZERS[optimizer], decide="drawn",
        init={name: partial(torch.index_select, reference.begun[name], 0) for name in reference.begun},
        fast_rows={"a": 3, "c": 0} if slow else None, slow=folder if slow else "memory",
    )  # fmt: skip
    for step in range(3):
        if step == 1:
            orders = {t.name: rng.permutation(t.rows) if t.name != "b" else orders["b"] for t in TABLES}
            request = replace(request, samples=request.samples + 100)
            module.reshard(request, orders)
        batches = [drawn(rng, orders) for _ in range(4)]
        if sums:
            with torch.set_grad_enabled(rank % 2 == 0):  # a pass that no gradient comes of
                module(asked(batches[rank - 1]))
        module.sent.clear()
        outputs = module(asked(batches[rank]))
        loss(outputs).backward()
        module.step()
        bytes_ = predicted(request, module, batches, orders)
        for phase, counts in bytes_.items():
            assert module.sent.get(phase, [0, 0]) == counts[rank].tolist(), (
                number,
                step,
                phase,
                module.sent,
                bytes_,
            )
        expected = reference.step(batches)[rank]
        assert set(outputs) == set(expected)
        for name, output in outputs.items():
            assert same[name](output, expected[name]), (number, step, name)
        for at, table in enumerate(TABLES):  # every copy of every row
            layout, tiers = module.layouts[at], module.tiers[at]
            ids = torch.from_numpy(orders[table.name][layout.ranks_on(rank)])
            mine, theirs = tiers.read(torch.arange(len(ids))), reference.records(table.name)
            width = theirs.shape[1]
            assert same[table.name](mine[:, :width], theirs[ids]), (number, step, table.name)
    module.close()


def bits(folder: Path) -> None:
    """Every optimizer, ranks in hosts of 1, 2 and 4, cuts drawn anew in the middle."""
    policy.POLICIES["drawn"] = cuts  # type: ignore[index]
    sharded.CHUNK = 16  # rows move in several parts
    for number, optimizer in enumerate((*OPTIMIZERS, "adagrad")):
        check(folder, number, (2, 1, 2, 4, 1, 2)[number], bool(number % 2), optimizer, slow=number in (1, 2))
    for number, devices in ((6, 2), (7, 1)):  # sums of pooled tables cross
        check(folder, number, devices, bool(number % 2), "adagrad", slow=number == 7, sums=True)


def module_of(**more: Any) -> ShardedEmbedding:
    fields = {"tables": TABLES, "intra": 1e9, "inter": 1e8, "samples": BAGS, "devices": 2} | more
    return ShardedEmbedding(exchange(**fields), optimizer=OPTIMIZERS["adam"])


def refused(why: str, call: Callable[[], object]) -> None:
    try:
        call()
    except UserError as error:
        assert why in str(error), error
    else:
        raise AssertionError(f"accepted: {why}")


def faults(folder: Path) -> None:
    """What is wrong on one rank is an error of all, and then they go on."""
    rank = dist.get_rank()
    two, ten = ({"tables": TABLES[: 2 if rank == 2 else 3]}, {"samples": 10 if rank == 1 else BAGS})
    refused("rank 2 has another tables than rank 0", lambda: module_of(**two))
    refused("rank 1 has another cluster than rank 0", lambda: module_of(**ten))
    refused("4 ranks are no whole number of hosts of 3", lambda: module_of(devices=3))
    wide = replace(TABLES[0], dim=1 << 20) if rank == 3 else TABLES[0]
    refused(
        "rank 3: memory is 9.77 KiB a device",
        lambda: module_of(tables=(wide,), memory=1e4 if rank == 3 else None),
    )
    module = module_of()
    ids, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 2])
    good: dict[str, Any] = {"a": ids, "b": (ids, offsets)}
    before = {name: output.detach() for name, output in module(good).items()}
    for wrong, why in (
        ({"a": torch.tensor([5, 41])}, "rank 2: table 'a': input[1] = 41 is no id; accepted are 0 to 40"),
        ({"c": torch.tensor([-1])}, "rank 2: table 'c': input[0] = -1 is no id"),
        ({"b": (ids, torch.tensor([0, 3, 2]))}, "rank 2: table 'b': offsets[2] = 2 falls"),
        ({"b": (ids, torch.tensor([1]))}, "rank 2: table 'b': offsets go from 1 to 1"),
        ({"b": ids}, "rank 2: table 'b': accepted are (ids [n], offsets [bags])"),
        (
            {"a": ids.float()},
            "rank 2: table 'a': input is torch.float32; accepted are torch.int32, torch.int64",
        ),
        ({"z": ids}, "rank 2: the batch has a table that there is not; accepted are a, b, c"),
    ):
        refused(why, lambda: module(wrong if rank == 2 else good))  # noqa: B023
    outputs = module(good if rank else {})
    if rank:
        assert all(torch.equal(outputs[name], before[name]) for name in before)
        loss(outputs).backward()
    refused("rank 1: there are gradients that no step has used", lambda: module.reshard(module.request))
    module.step()
    refused("these are other tables", lambda: module.reshard(replace(module.request, tables=TABLES[:2])))
    killed(module, good)


def killed(module: ShardedEmbedding, batch: dict[str, Any]) -> None:
    """Rank 3 is killed in the middle of an exchange that the others wait for; none of them hangs."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    if rank == 3:
        store.set("pid", str(os.getpid()))
        signal.pause()
    if rank == 0:
        os.kill(int(store.get("pid")), signal.SIGKILL)
    try:
        module(batch)
    except HostError as error:
        assert f"rank {rank} cannot exchange" in str(error)
        os._exit(0)
    raise AssertionError("the dead rank was not missed")


def kept(folder: Path) -> None:
    """Saved by 4 ranks, read by one table and by 2 ranks with other cuts; a damaged file by none."""
    rank = dist.get_rank()
    orders = {table.name: np.random.default_rng(3).permutation(table.rows) for table in TABLES}
    policy.POLICIES["drawn"] = cuts  # type: ignore[index]

    def spread(samples: int, ranks: list[int]) -> ShardedEmbedding:
        # every rank makes every group
        group = dist.new_group(ranks)
        if rank not in ranks:
            return None  # type: ignore[return-value]
        request = exchange(TABLES, samples, intra=1e9, inter=1e8, devices=len(ranks) // 2, group=group)
        return ShardedEmbedding(
            request,
            orders=orders if samples == 1 else {},
            optimizer=OPTIMIZERS["adam"],
            decide="drawn",
            group=group,
        )

    module, pair = spread(1, [0, 1, 2, 3]), spread(2, [1, 3])
    draws = np.random.default_rng(rank)
    for _ in range(2):
        loss(module(asked(drawn(draws, orders)))).backward()
        module.step()
    module.save(folder / "kept")
    if pair:
        pair.load(folder / "kept")
        for number, table in enumerate(TABLES):
            ids = torch.from_numpy(pair.layouts[number].ranks_on(pair.wire.rank))
            places = module.layouts[number].place(torch.from_numpy(np.argsort(orders[table.name]))[ids])
            here = torch.from_numpy(module.layouts[number].holds(np.argsort(orders[table.name])[ids], rank))
            mine = pair.tiers[number].read(torch.arange(len(ids)))
            assert torch.equal(mine[here], module.tiers[number].read(places[here]))
            assert pair.rules[number].steps == module.rules[number].steps == 2
    pair = pair and pair.save(folder / "again")  # type: ignore[func-returns-value]
    dist.barrier()
    for table in TABLES:
        first, second = (folder / name / f"{table.name}.safetensors" for name in ("kept", "again"))
        assert first.read_bytes() == second.read_bytes()
    if rank == 0:
        bag = TieredEmbeddingBag(41, 3, 5, name="a", mode="none", optimizer=OPTIMIZERS["adam"])
        bag.load(folder / "kept" / "a.safetensors")
        held = bag.read(torch.from_numpy(orders["a"][module.layouts[0].ranks_on(0)]))
        assert torch.equal(held, module.tiers[0].read(torch.arange(len(held))))
    dist.barrier()
    if rank == 0:
        data = bytearray((folder / "again" / "c.safetensors").read_bytes())
        data[-9] ^= 1
        (folder / "again" / "c.safetensors").write_bytes(data)
        (folder / "file").touch()
    dist.barrier()
    before = [tier.read(torch.arange(tier.rows)) for tier in module.tiers]
    refused("is damaged", lambda: module.load(folder / "again"))
    refused("cannot be read", lambda: module.load(folder / "nowhere"))
    assert all(
        torch.equal(tier.read(torch.arange(tier.rows)), b)
        for tier, b in zip(module.tiers, before, strict=True)
    )
    try:
        module.save(folder / "file" / "below")
    except HostError as error:
        assert str(error).startswith(f"rank 0: checkpoint {folder}") and "cannot be written" in str(error)
    else:
        raise AssertionError("saved below a file")
    dist.barrier()


def recorded(folder: Path) -> None:
    """Decisions, each for tables that are asked for otherwise, or by another policy, and the ids of the rows
    that a rank has then: each begins as its id."""
    log = EventLog(folder / "events.jsonl")
    curve = {"ranks": (0, 2, 41), "shares": (0.0, 0.9, 1.0)}
    tables = (replace(TABLES[0], **curve), *TABLES[1:])  # type: ignore[arg-type]
    request = exchange(tables, 64, intra=1e9, inter=1e8, devices=1, distinct=False)
    init = {table.name: partial(_numbered, table.dim) for table in tables}
    module = ShardedEmbedding(request, log=log, init=init)
    for wanted, decide in (
        (request, "flexshard"),
        (replace(request, tables=TABLES), "flexshard"),
        (replace(request, distinct=True, memory=6e4), "recshard"),
        (request, "row-wise"),
        (replace(request, samples=9), "flexshard"),
    ):
        if wanted is not request or decide != "flexshard":
            module.reshard(wanted, decide=decide)
        rows = {
            name: tier.read(torch.arange(tier.rows))[:, 0].int().tolist()
            for name, tier in zip(module.names, module.tiers, strict=True)
        }
        log.append("holds", rank=dist.get_rank(), rows=rows)
        dist.barrier()


def _numbered(dim: int, ids: torch.Tensor) -> torch.Tensor:
    return ids[:, None].float().expand(-1, dim).contiguous()


def main() -> None:
    part, folder = sys.argv[1], Path(sys.argv[2])
    if part == "faults" and os.environ["RANK"] == "3" and (child := os.fork()):
        status = os.waitpid(child, 0)[1]
        os._exit(0 if os.WIFSIGNALED(status) else 1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    {"bits": bits, "faults": faults, "kept": kept, "recorded": recorded}[part](folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    with torch.sparse.check_sparse_tensor_invariants(False):
        main()
