"""`ShardedEmbedding`: tables whose rows are spread over the ranks of a job (after FlexShard, 2023).

Hot rows lie on every rank, warm ones once in every host, cold ones once in all (`policy.replicas` decides,
`layout` says where). A lookup is one exchange for all tables: counts, then ids to the ranks that hold the
rows, then vectors back. Sequences are given out as they are; pooled tables are pooled by who asked, in the
order of his ids.

    seen = exchange(tables, samples=512, intra=300e9, inter=25e9)      # on every rank
    embeddings = ShardedEmbedding(seen, optimizer=partial(torch.optim.Adagrad, lr=0.05), orders=orders)
    vectors = embeddings({"items": ids, "tags": (ids, offsets)})
    loss(vectors).backward()
    embeddings.step()                                                  # gradients cross here

Bits. A row's gradient is summed position by position within a rank, and then rank by rank: as one table in
one process has it that takes the ranks' batches in turn and steps once. Wherever the row lies, however many
copies it has, and whatever moved: outputs, weights and the optimizer's state are that table's, bit for bit;
those of a stock ``torch.nn.EmbeddingBag``, which sums gradients in another order, to float32 rounding.
For rows with copies the sum goes from host to host in the ranks' order, in stripes so that hosts work at
once, and the end of it to all copies, which take the same step.

All ranks call `forward`, `step`, `reshard`, `save` and `load` together. What is wrong with one rank's batch
is the same error on all of them, and nothing has changed. A rank that dies is an error of the others at once
or, if the network hides it, within the timeout of the group; go on from a checkpoint.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn import functional

from windtunnel.base.errors import HostError, UserError
from windtunnel.base.plain import to_plain
from windtunnel.data.embeddings import policy
from windtunnel.data.embeddings.layout import RowLayout, layouts
from windtunnel.data.embeddings.live import checkpoint
from windtunnel.data.embeddings.live.copies import Sums, fold, joined, over_hosts, to_copies
from windtunnel.data.embeddings.live.ids import BatchIds, Ids, Init, checked, uniform
from windtunnel.data.embeddings.live.optim import OptimizerFactory, TableOptimizer
from windtunnel.data.embeddings.live.parts import Cut, RowRequests, cut
from windtunnel.data.embeddings.live.tiers import Tiers
from windtunnel.data.embeddings.live.wire import Wire
from windtunnel.data.embeddings.model import EmbeddingTable
from windtunnel.data.embeddings.policy import ReplicationRequest
from windtunnel.store.eventlog import EventLog

CAPABILITY = "data.embeddings"
CHUNK = 1 << 15
"""Rows of a table that a rank asks for at once when they move."""
CURVE: dict[str, Any] = {"ranks": (), "shares": (), "pooling": 0.0, "coverage": 0.0, "state_bytes": 0}
"""What of a table may change while it trains."""
NONE = torch.empty(0, dtype=torch.long)


def exchange(
    tables: tuple[EmbeddingTable, ...], samples: float, *, intra: float, inter: float,
    devices: int | None = None, group: dist.ProcessGroup | None = None, **more: Any,
) -> ReplicationRequest:  # fmt: skip
    """What spreading ``tables`` over the ranks of ``group`` asks. ``devices``: ranks of a host (default:
    LOCAL_WORLD_SIZE, as torchrun has it); other fields as in `ReplicationRequest`.

    Raises:
        UserError: the ranks are no whole number of hosts.
    """
    world = dist.get_world_size(group)
    local = devices or int(os.environ.get("LOCAL_WORLD_SIZE", world))
    if world % local:
        raise UserError(f"{world} ranks are no whole number of hosts of {local}; say devices=")
    return ReplicationRequest(tables, world // local, local, intra, inter, samples, **more)


class ShardedEmbedding(torch.nn.Module):
    """The tables of ``exchange``, spread as the policy ``decide`` says (named in the log as ``name``).

    ``orders``: of a table the id of each rank, [rows]; default: ids are ranks. ``optimizer`` makes one from a
    list of parameters; None: the tables do not train. ``init``: of a table, a function from ids to the
    weights they begin with; default: uniform in +-1/sqrt(rows), by ``seed`` and id. ``fast_rows``: of a
    table, how many of a rank's rows lie in memory, the most wanted ones; default all. ``slow``: the folder
    for files with the others, "memory" for memory of the host. ``log`` gets every decision, from rank 0,
    and from each rank how many rows of each table it then has.

    Raises:
        UserError: an argument is wrong, or not the same on all ranks; in `forward`, a rank's batch is.
        windtunnel.HostError: another rank is gone, or the slow tier fails.
    """

    def __init__(
        self, exchange: ReplicationRequest, *, orders: Mapping[str, ArrayLike] | None = None,
        optimizer: OptimizerFactory | None = None, init: Mapping[str, Init] | None = None,
        fast_rows: Mapping[str, int] | None = None, slow: str | Path = "memory", seed: int = 0,
        group: dist.ProcessGroup | None = None, log: EventLog | None = None,
        decide: str = "flexshard",
    ) -> None:  # fmt: skip
        super().__init__()
        self.wire = Wire(group, exchange.devices)
        self._log, self._name = log, decide
        self._fast, self._slow, self._generation = dict(fast_rows or {}), slow, 0
        self.names = [table.name for table in exchange.tables]
        begun = {
            table.name: partial(uniform, dim=table.dim, bound=table.rows**-0.5, seed=seed)
            for table in exchange.tables
        }
        self._init: dict[str, Init] = {**begun, **(init or {})}
        self.rules = [TableOptimizer(table.name, table.dim, optimizer) for table in exchange.tables]
        self.request, self.decision, self.layouts, self._ids = self._decided(exchange, orders or {})
        self.tiers = [
            self._empty_tiers(number, *pair)
            for number, pair in enumerate(zip(self.layouts, self._ids, strict=True))
        ]
        self._forget()
        self._placed()

    def _placed(self) -> None:
        if self._log is not None:
            rows = {name: tiers.rows for name, tiers in zip(self.names, self.tiers, strict=True)}
            self._log.append("placed", rank=self.wire.rank, rows=rows)

    def _forget(self) -> None:
        """Passes that no step has used."""
        self._pending: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.names]
        self._parts = {
            at: RowRequests(self.wire.world)
            for at, table in enumerate(self.request.tables)
            if self.request.sums(table)
        }

    @property
    def sent(self) -> dict[str, list[int]]:
        """Bytes that this rank has sent, by phase: inside its host, and to others."""
        return self.wire.sent

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of every table's optimizer its learning rate and the like; change them on all ranks alike."""
        return [group for rule in self.rules for group in rule.groups]

    def forward(self, batch: Mapping[str, BatchIds]) -> dict[str, Tensor]:
        """Of each table in ``batch`` (any of them, on any rank): ids [n] of a sequence give vectors [n, dim];
        ids [n] and offsets [bags] of a pooled one give sums [bags, dim]."""
        tensors, offsets, wrong = checked(batch, self.request.tables, self._ids)
        training = torch.is_grad_enabled() and self.rules[0].optimizer is not None
        table_ranks, inverses, cuts = [], [], dict[int, Cut]()
        for number, (ids, table_ids) in enumerate(zip(tensors, self._ids, strict=True)):
            tensor = table_ids.ranks(ids)
            if number in self._parts:
                layout = self.layouts[number]
                ends, to = offsets.get(self.names[number], NONE), layout.destination(tensor, self.wire.host)
                cuts[number], tensor = cut(layout.place(tensor), to, ends), NONE
            if self.request.distinct:
                tensor, inverse = torch.unique(tensor, return_inverse=True)
                inverses.append(inverse)
            table_ranks.append(tensor)
        for tiers in self.tiers:
            tiers.drop()
        vectors = self._ask(table_ranks, wrong, cuts=cuts, training=training)
        outputs = {}
        for number, (name, tensor) in enumerate(zip(self.names, vectors, strict=True)):
            ranks = table_ranks[number]
            if number in cuts:
                ranks = self._parts[number].numbered(cuts[number].ranks) if training else NONE
            elif inverses:
                tensor, ranks = tensor[inverses[number]], ranks[inverses[number]]
            if name not in batch:
                continue
            if training:
                tensor.requires_grad_()
                tensor.register_post_accumulate_grad_hook(partial(self._collect, number, ranks))
            outputs[name] = tensor.view(tensor.shape)
            if number in cuts:
                sums = tensor.new_zeros(len(offsets[name]), tensor.shape[1])
                outputs[name] = sums.index_add(0, cuts[number].bags, tensor)
            elif name in offsets:
                every = torch.arange(len(tensor))
                outputs[name] = functional.embedding_bag(every, tensor, offsets[name], mode="sum")
        return outputs

    @torch.no_grad()
    def step(self) -> None:
        """The optimizer's step over all rows that have a gradient on any rank; a table without any does not
        step."""
        ranks, values = [], []
        for number, (layout, pending) in enumerate(zip(self.layouts, self._pending, strict=True)):
            table = self.request.tables[number]
            ranks_looked_up = torch.cat([NONE, *(tensor for tensor, _ in pending)])
            gradient = torch.cat([torch.empty(0, table.dim), *(tensor for _, tensor in pending)])
            once = self.request.distinct or number in self._parts
            folded = ranks_looked_up >= 0 if once else ranks_looked_up < layout.hot
            first, summed = fold(ranks_looked_up[folded], gradient[folded])
            ranks.append(torch.cat([first, ranks_looked_up[~folded]]))
            values.append(torch.cat([summed, gradient[~folded]]))
        stepping = torch.tensor([len(pending) for pending in self._pending])
        parts = self._parts
        self._forget()
        to, where = self._destinations(ranks)
        for number in parts:  # keys
            to[number], where[number] = ranks[number] % self.wire.world, ranks[number] // self.wire.world
        came = self.wire.deliver("gradients", to, where, values, head=stepping)
        copied, sums = Sums(), Sums()  # of rows with copies, rank by rank; of cold rows, whole
        for number, layout in enumerate(self.layouts):
            places, gradients = came.places[number], came.values[number]
            if number in parts:
                places, gradients = parts[number].places_of(came.sources(number), places, gradients)
            elif not self.request.distinct:  # first what each rank has
                rows = max(1, layout.count(self.wire.rank))
                places, gradients = fold(came.sources(number) * rows + places, gradients)
                places = places % rows
            replicated = places < layout.replicated(self.wire.rank)
            copied.append((places[replicated], gradients[replicated]))
            sums.append(fold(places[~replicated], gradients[~replicated]))
        if any(layout.warm for layout in self.layouts):
            sums = joined(over_hosts(self.wire, self.request, copied), sums)
        if any(layout.hot for layout in self.layouts):
            sums = to_copies(self.wire, self.layouts, sums)
        for number, (places, gradients) in enumerate(sums):
            rule, tiers = self.rules[number], self.tiers[number]
            if len(places):
                places, order = places.sort()
                rule.step(tiers, tiers.places(places), gradients[order], distinct=True)
            elif came.heads[:, number].any():
                rule.reset(rule.steps + 1)

    def reshard(
        self,
        exchange: ReplicationRequest,
        orders: Mapping[str, ArrayLike] | None = None,
        decide: str | None = None,
    ) -> None:
        """Decides anew for ``exchange``, the same tables with the curves (and ``orders``) that they have now,
        and moves rows and the optimizer's state to where they then lie; between two steps. The tables stay
        what they are, bit for bit. One at a time: of a table a rank has its old and its new rows, and
        `CHUNK` rows on their way.

        Raises:
            UserError: other tables or ranks, or gradients that wait for `step`; nothing has moved.
        """
        wrong, was = "", [replace(table, **CURVE) for table in self.request.tables]
        if any(self._pending):
            wrong = "there are gradients that no step has used; accepted is between two steps"
        elif [replace(table, **CURVE) for table in exchange.tables] != was:
            wrong = f"these are other tables; accepted are those that there are: {', '.join(self.names)}"
        self._name = decide or self._name
        old = self.layouts, self._ids
        self.request, self.decision, new, new_ids = self._decided(exchange, orders or {}, wrong)
        self._generation += 1
        self._forget()
        for number, (layout, tiers) in enumerate(zip(new, self.tiers, strict=True)):
            tiers.drop()
            self.layouts = [*new[:number], *old[0][number:]]
            tier = self._empty_tiers(number, layout, new_ids[number])
            longest = max(layout.count(rank) for rank in range(self.wire.world))
            for first in range(0, longest, CHUNK):
                last = min(first + CHUNK, layout.count(self.wire.rank))
                places = torch.arange(min(first, last), last)
                ids = new_ids[number].of(_ranks_on(layout, self.wire.rank, places))
                tier.write(places, self._records(number, old[1][number].ranks(ids)))
            tiers.close()
            self.tiers[number] = tier
        self.layouts, self._ids = new, new_ids
        self._placed()

    def save(self, folder: str | Path) -> None:
        """Every table as one file of `checkpoint`, written by rank 0, for `load` on any ranks and for
        ``TieredEmbeddingBag``. Take a new folder each time; it is whole when this returns.

        Raises:
            windtunnel.HostError: it cannot be written; on all ranks.
        """
        for number, table in enumerate(self.request.tables):
            spans, ranks = list(checkpoint.spans(table.rows)), self._ids[number].ranks
            failed: HostError | None = None
            if self.wire.rank == 0:
                chunks = (self._records(number, ranks(torch.arange(*span))) for span in spans)
                try:
                    Path(folder).mkdir(parents=True, exist_ok=True)
                    checkpoint.write(_file(folder, table), self._saved(number), chunks)
                except OSError as error:
                    failed = HostError(f"checkpoint {folder}: cannot be written ({error.strerror})")
                except HostError as error:
                    failed = error
            else:
                for _ in spans:
                    self._records(number, NONE)
            self._records(number, NONE, failed)  # how it went

    def load(self, folder: str | Path) -> None:
        """What `save` or ``TieredEmbeddingBag.save`` has written, which every rank reads for itself.

        Raises:
            UserError: a file is missing, damaged, or of another table; on all ranks, and nothing has changed.
        """
        shards, wrong = [], None
        try:
            for number, table in enumerate(self.request.tables):
                shards.append(checkpoint.read(_file(folder, table), self._saved(number)))
        except UserError as error:
            wrong = error
        self.wire.agreed(wrong)
        self._forget()
        for number, (saved, chunks) in enumerate(shards):
            layout, tiers = self.layouts[number], self.tiers[number]
            tiers.drop()
            for ids, records in chunks:
                ranks = self._ids[number].ranks(ids)
                mine = torch.from_numpy(layout.holds(ranks.numpy(), self.wire.rank))
                tiers.write(layout.place(ranks[mine]), records[mine])
            self.rules[number].reset(saved.steps)

    def _saved(self, number: int) -> checkpoint.TableFileHeader:
        table = self.request.tables[number]
        return self.rules[number].saved(table.name, table.rows)

    @torch.no_grad()
    def _records(self, number: int, ranks: Tensor, wrong: HostError | None = None) -> Tensor:
        """Of table ``number`` weights and state of ``ranks`` (distinct), [n, width]; all ranks of the
        job call it together. ``wrong``: why this one cannot go on, which is an error of all."""
        tensors = [NONE] * len(self.names)
        tensors[number] = ranks
        return self._ask(tensors, wrong, number)[number]

    def close(self) -> None:
        """Gives slow tiers up; their files are removed."""
        for tiers in self.tiers:
            tiers.close()

    def _ask(
        self, tensors: list[Tensor], wrong: UserError | HostError | None, whole: int = -1, *,
        cuts: Mapping[int, Cut] | None = None, training: bool = False,
    ) -> list[Tensor]:  # fmt: skip
        """Of each table the vectors of ``asked`` ranks, wherever they lie; of table ``whole``, records; of
        those with ``cuts``, the sums of their parts. A head's first bit: what is asked is wrong; its second:
        ``training``."""

        def stop(heads: Tensor) -> None:
            if (heads & 1).any():
                self.wire.agreed(wrong)

        phases = ("ids", "vectors") if whole < 0 else ("moved", "moved")
        far = [ranks >= layout.hot for layout, ranks in zip(self.layouts, tensors, strict=True)]
        table_ranks = [ranks[some] for ranks, some in zip(tensors, far, strict=True)]
        (to, where), cuts = self._destinations(table_ranks), cuts or {}
        for number, part in cuts.items():
            to[number], where[number] = part.to, part.places
        head = torch.tensor([(wrong is not None) + 2 * training])
        came = self.wire.deliver(phases[0], to, where, head=head, stop=stop)
        answers = []
        for number, places in enumerate(came.places):
            if number in cuts:
                sums, came.take[:, number] = self._parts[number].answer(
                    self.tiers[number], places, came.sources(number), came.heads[:, 0] >= 2
                )
                came.give[:, number] = torch.bincount(cuts[number].ranks, minlength=self.wire.world)
                answers.append(sums)
            else:
                answers.append(self._read(number, places, whole))
        answered = self.wire.exchange(phases[1], answers, came.take, came.give)
        vectors_by_table = []
        for number, (ranks, some, order) in enumerate(zip(tensors, far, came.order, strict=True)):
            if number in cuts:
                vectors_by_table.append(answered[number])
                continue
            vectors = answered[number].new_empty(len(ranks), answered[number].shape[1])
            vectors[some.nonzero()[:, 0][order]] = answered[number]
            vectors[~some] = self._read(number, ranks[~some], whole)  # a hot row's place is its rank
            vectors_by_table.append(vectors)
        return vectors_by_table

    def _read(self, number: int, places: Tensor, whole: int) -> Tensor:
        tiers = self.tiers[number]
        if number == whole:
            distinct, inverse = torch.unique(places, return_inverse=True)
            return tiers.read(distinct)[inverse]
        return tiers.weight[tiers.places(places)].cpu()

    def _collect(self, number: int, ranks: Tensor, vectors: Tensor) -> None:
        assert vectors.grad is not None
        self._pending[number].append((ranks, vectors.grad.cpu()))
        vectors.grad = None

    def _destinations(self, ranks: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Of each table which rank to ask for ``ranks``, and their places there."""
        pairs = list(zip(self.layouts, ranks, strict=True))
        return [layout.destination(some, self.wire.host) for layout, some in pairs], [
            layout.place(some) for layout, some in pairs
        ]

    def _decided(
        self, exchange: ReplicationRequest, orders: Mapping[str, ArrayLike], wrong: str = ""
    ) -> tuple[ReplicationRequest, policy.Replication, list[RowLayout], list[Ids]]:
        """Decides, on all ranks alike, or is refused by all."""
        decision, table_ids = None, list[Ids]()
        if (exchange.world, exchange.devices) != (self.wire.world, self.wire.devices):
            wrong = f"{exchange.hosts} hosts of {exchange.devices} devices, not {self.wire.world} ranks"
        if any(table.dtype != "float32" for table in exchange.tables):
            wrong = "a table is not float32, which is accepted"
        if self._name not in policy.POLICIES:
            wrong = f"policy {self._name!r} is unknown; accepted are {', '.join(policy.POLICIES)}"
        try:
            decision = policy.POLICIES[self._name](exchange) if not wrong else None
            table_ids = [Ids(table.name, table.rows, orders.get(table.name)) for table in exchange.tables]
        except UserError as error:
            wrong = str(error)
        hashes = {
            name: hashlib.sha256(np.ascontiguousarray(order).data).hexdigest()
            for name, order in orders.items()
        }
        same = {
            "tables": [to_plain(table) for table in exchange.tables],
            "cluster": to_plain(exchange) | {"tables": 0},
            "orders": hashes,
            "optimizer": [repr(rule.optimizer) for rule in self.rules],
            "plan": to_plain(decision),
        }
        self.wire.agreed(UserError(wrong) if wrong else None)
        self.wire.alike(same)
        assert isinstance(decision, policy.Replication)
        if self._log is not None and self.wire.rank == 0:
            self._log.decision(CAPABILITY, self._name, exchange, decision)
        where = layouts(
            decision.tables, [table.rows for table in exchange.tables], exchange.hosts, exchange.devices
        )
        return exchange, decision, where, table_ids

    def _empty_tiers(self, number: int, layout: RowLayout, ids: Ids) -> Tiers:
        """An empty store for this rank's rows of a table."""
        table, rule, rank = self.request.tables[number], self.rules[number], self.wire.rank
        rows, slow = layout.count(rank), self._slow
        if slow != "memory":
            slow = Path(slow) / f"{rank}-{number}-{self._generation}.rows"
        return Tiers(
            rows, table.dim, self._fast.get(table.name, rows), slow,
            lambda places: self._init[table.name](ids.of(_ranks_on(layout, rank, places))),
            widths=rule.widths, initial=rule.initial,
        )  # fmt: skip


def _ranks_on(layout: RowLayout, rank: int, places: Tensor) -> Tensor:
    return torch.from_numpy(layout.ranks_on(rank, places.numpy()))


def _file(folder: str | Path, table: EmbeddingTable) -> Path:
    return Path(folder) / f"{quote(table.name, safe='')}.safetensors"
