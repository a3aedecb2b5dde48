"""`TieredEmbeddingBag`: ``torch.nn.EmbeddingBag`` for a table that is larger than fast memory.

The most wanted rows lie in a fast tier (host memory, or a device's), all others in a slow one (a file, or
host memory); an order of the ids, by how often each is asked for, says which (RecShard, ASPLOS 2022: row
remapping). Forward, gradients and the optimizer's step equal one unsharded table with ``sparse=True`` bit for
bit, whatever lies where: rows of all tiers are pooled together in the order of ``input``, never tier by tier
(see `optim` for sums of gradients). Against a stock one, whose dense gradients torch sums in another order,
they are equal to float32 rounding.

    bag = TieredEmbeddingBag(10_000_000, 64, fast_rows=1_000_000, order=order, slow="/nvme/user.rows",
                             optimizer=partial(torch.optim.Adagrad, lr=0.05))
    optimizer = TieredOptimizer(model)           # of all such tables in a model; takes LR schedulers
    model(batch).backward(); optimizer.step()    # dense parameters have an optimizer of their own

The table is no ``nn.Parameter``: an optimizer of ``model.parameters()`` does not see it, and its gradient is
`grad`, sparse and by id. A forward pass depends on what is asked for, so ``torch.compile`` breaks the graph
here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn import functional

from windtunnel.base.errors import HostError, UserError
from windtunnel.data.embeddings.live import checkpoint
from windtunnel.data.embeddings.live.ids import Ids, Init, uniform
from windtunnel.data.embeddings.live.optim import OptimizerFactory, TableOptimizer
from windtunnel.data.embeddings.live.tiers import Tiers


class TieredEmbeddingBag(torch.nn.Module):
    """A table of ``rows`` by ``dim`` float32, of which ``fast_rows`` lie in the fast tier.

    ``order``: of each rank its id, [rows] (an array, or a memory map of a file); default: ids are ranks. 4
    bytes a row are kept of it. ``slow``: a file's path, or "memory". ``mode``: "sum", "mean", or "none": a
    sequence, every row is given out. ``optimizer`` makes one from a list of parameters; None: the rows do
    not train. ``init``: weights that rows begin with, a tensor [rows, dim] or a function of ids; default:
    uniform in +-1/sqrt(rows), drawn from ``seed`` and id alone. Rows are made when they are first asked for.

    Raises:
        UserError: an argument is wrong; in `forward`, ``input``, ``offsets`` or weights are.
        windtunnel.HostError: the slow tier cannot be made, read or written.
    """

    def __init__(
        self, rows: int, dim: int, fast_rows: int, *, order: ArrayLike | None = None,
        slow: str | Path = "memory", mode: Literal["sum", "mean", "none"] = "sum",
        optimizer: OptimizerFactory | None = None,
        init: Tensor | Init | None = None, include_last_offset: bool = False, name: str = "table",
        device: str | torch.device = "cpu", seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.name, self.rows, self.dim, self.mode = name, rows, dim, mode
        self.include_last_offset = include_last_offset
        for what, value, least in (("rows", rows, 1), ("dim", dim, 1), ("fast_rows", fast_rows, 0)):
            if not isinstance(value, int) or value < least:
                raise UserError(
                    f"table {name!r}: {what} = {value!r} is no count; accepted are whole numbers from {least}"
                )
        if mode not in ("sum", "mean", "none"):
            raise UserError(f"table {name!r}: mode {mode!r} is not known; accepted are sum, mean, none")
        self.rule = TableOptimizer(name, dim, optimizer)
        self._ids = Ids(name, rows, order)
        self._init: Init = partial(uniform, dim=dim, bound=rows**-0.5, seed=seed)
        if init is not None and not isinstance(init, Tensor):
            self._init = init
        self._slow, self._device, self._generation = slow, device, 0
        self.tiers = self._empty_tiers(fast_rows, self._ids)
        self._pending: list[tuple[Tensor, Tensor]] = []  # ids and their gradient by place, as passes came
        self._graphs: list[weakref.ref[Tensor]] = []  # what staged rows may still be needed for
        if isinstance(init, Tensor):
            self._fill(init)

    @property
    def fast_rows(self) -> int:
        return self.tiers.fast_rows

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """As ``torch.nn.EmbeddingBag``: ids [n] and ``offsets`` [bags], or ids [bags, n], give [bags, dim].

        With mode "none", as ``torch.nn.Embedding``: ids of any shape give [..., dim].
        """
        flat, offsets = self._checked(input, offsets, per_sample_weights)
        if not self._pending and all(graph() is None for graph in self._graphs):
            self._graphs.clear()
            self.tiers.drop()
        places = self.tiers.places(self._ids.ranks(flat))
        weight = self.tiers.weight.detach()
        if self.rule.optimizer and torch.is_grad_enabled():
            weight.requires_grad_()
            weight.register_post_accumulate_grad_hook(partial(self._collect, flat))
            self._graphs.append(weakref.ref(weight))
        if self.mode == "none":
            return functional.embedding(places.view(input.shape), weight, sparse=True)
        if offsets is None:
            places = places.view(input.shape)
            last = False
        else:
            offsets, last = offsets.to(places.device), self.include_last_offset
        return functional.embedding_bag(
            places, weight, offsets, mode=self.mode, sparse=True, per_sample_weights=per_sample_weights,
            include_last_offset=last,
        )  # fmt: skip

    @property
    def grad(self) -> Tensor | None:
        """The table's gradient since the last step: sparse, [rows, dim], occurrences in order; None without
        any."""
        total = None
        for ids, gradient in self._pending:
            tensor = torch.sparse_coo_tensor(
                ids[None].to(gradient.device),
                gradient._values(),
                (self.rows, self.dim),
                check_invariants=False,
            )
            total = tensor if total is None else total + tensor
        return total

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._pending.clear()

    @torch.no_grad()
    def step(self) -> None:
        """The optimizer's step over the rows that have a gradient; without any, nothing.

        Raises:
            HostError: changed rows cannot be written back. The step is done, they are in fast memory, and
                the next forward pass, or `flush`, tries again.
        """
        if not self._pending:
            return
        sums = self.rule.sums
        if sums or len(self._pending) > 1:
            gradient = self.grad
            assert gradient is not None
            if sums:
                gradient = gradient.coalesce()  # by id, as one table would: its order is no other one's
            places = self.tiers.places(self._ids.ranks(gradient._indices()[0].cpu()))
        else:
            gradient = self._pending[0][1]
            places = gradient._indices()[0]
        self._pending.clear()
        self.rule.step(self.tiers, places, gradient._values(), distinct=sums)

    def flush(self) -> None:
        """Writes back what a full disk has kept from being written."""
        self.tiers.flush()

    def read(self, ids: Tensor) -> Tensor:
        """Records of these ids (distinct), [n, dim and what the optimizer keeps], on the CPU."""
        return self.tiers.read(self._ids.ranks(ids))

    def write(self, ids: Tensor, records: Tensor) -> None:
        """Replaces records of these ids (distinct)."""
        self.tiers.write(self._ids.ranks(ids), records)

    def retier(self, order: ArrayLike, fast_rows: int | None = None) -> None:
        """The first ``fast_rows`` (default: as many as now) ids of ``order`` become the fast ones; the table
        stays what it is. Between two steps. New tiers are made beside the old ones, a file as ``slow.1``,
        ``slow.2`` and so on, which then go.

        Raises:
            UserError: ``order`` does not name each id once.
            windtunnel.HostError: there is no room for both; the table is as it was.
        """
        self._settled("retier")
        ids = Ids(self.name, self.rows, order)
        tiers = self._empty_tiers(self.fast_rows if fast_rows is None else fast_rows, ids)
        try:
            for span in checkpoint.spans(self.rows):
                some = torch.arange(*span)
                # others begin there as they would here
                some = some[self.tiers.initialized[self._ids.ranks(some)]]
                tiers.write(ids.ranks(some), self.read(some))
        except HostError:
            tiers.close()
            raise
        self.tiers.close()
        self.tiers, self._ids = tiers, ids

    def save(self, path: str | Path) -> None:
        """Writes the table and what the optimizer keeps as one file (see `checkpoint`), row by row.

        Raises:
            windtunnel.HostError: it cannot be written; what had the name before is as it was.
        """
        checkpoint.write(
            path,
            self.rule.saved(self.name, self.rows),
            (self.read(torch.arange(*span)) for span in checkpoint.spans(self.rows)),
        )

    def load(self, path: str | Path) -> None:
        """Takes all rows, and the count of steps, from a file that `save` wrote, of whatever tiers and order.

        Raises:
            UserError: it is damaged, or of another table or optimizer; the table is as it was.
        """
        saved, chunks = checkpoint.read(path, self.rule.saved(self.name, self.rows))
        self._replace(saved.steps, chunks)

    def close(self) -> None:
        """Gives the slow tier up; its file is removed."""
        self.tiers.close()

    def _replace(self, steps: int, chunks: Iterable[tuple[Tensor, Tensor]]) -> None:
        self.zero_grad()
        self.tiers.drop()
        for ids, records in chunks:
            self.write(ids, records)
        self.rule.reset(steps)

    def get_extra_state(self) -> dict[str, Any]:
        """For ``state_dict``: what `save` writes, as tensors."""
        size, free = 4 * self.rows * self.tiers.width, psutil.virtual_memory().available
        if size > free:
            raise self._ids.wrong(
                f"state_dict takes {size:,} bytes of {free:,} that are free; accepted is save(path)"
            )
        saved, records = self.rule.saved(self.name, self.rows), self.read(torch.arange(self.rows))
        parts = records.split(list(saved.tensors.values()), 1)
        tensors = zip(saved.tensors, (part.contiguous() for part in parts), strict=True)
        return {"steps": saved.steps, **dict(tensors)}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """For ``load_state_dict``: of whatever tiers and order."""
        names = self.rule.saved(self.name, self.rows).tensors
        shapes = {name: list(tensor.shape) for name, tensor in state.items() if name != "steps"}
        expected = {name: [self.rows, width] for name, width in names.items()}
        if shapes != expected:
            raise self._ids.wrong(f"a state of {shapes}; accepted is one of {expected}")
        chunks = ((torch.arange(first, last), torch.cat([state[name][first:last].cpu() for name in names], 1))
                  for first, last in checkpoint.spans(self.rows))  # fmt: skip
        self._replace(state["steps"], chunks)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TieredEmbeddingBag:
        """What ``Module.to`` and its like do: the fast tier moves, the slow one stays; rows stay float32."""
        moved = fn(torch.empty(0, device=self.tiers.device))
        if moved.dtype != torch.float32 or moved.device.type == "meta":
            raise self._ids.wrong(
                f"rows cannot become {moved.dtype} on {moved.device}; accepted are torch.float32 on a device"
            )
        if moved.device != self.tiers.device:
            self._settled("to")
            self.tiers.move(moved.device)
            self._device = moved.device
        return self

    def __getstate__(self) -> dict[str, Any]:
        raise self._ids.wrong(
            "tiers are not copied or pickled; accepted is save(path), and load(path) into another table"
        )

    def extra_repr(self) -> str:
        fast = f"{self.fast_rows:,} fast rows on {self.tiers.device}"
        return f"{self.name!r}, {self.rows:,} x {self.dim}, {fast}, mode={self.mode}"

    def _settled(self, what: str) -> None:
        if self._pending:
            raise self._ids.wrong(f"{what} amid a step; accepted is after step() or zero_grad()")
        self.tiers.drop()

    def _collect(self, ids: Tensor, weight: Tensor) -> None:
        assert weight.grad is not None
        self._pending.append((ids, weight.grad))
        weight.grad = None

    def _empty_tiers(self, fast_rows: int, ids: Ids) -> Tiers:
        """Empty ones."""
        slow, number = self._slow, self._generation
        if slow != "memory" and number:
            slow = Path(f"{slow}.{number}")
        self._generation += 1
        return Tiers(
            self.rows, self.dim, fast_rows, slow, lambda ranks: self._init(ids.of(ranks)),
            device=self._device, widths=self.rule.widths, initial=self.rule.initial,
        )  # fmt: skip

    def _fill(self, weights: Tensor) -> None:
        if weights.shape != (self.rows, self.dim) or weights.dtype != torch.float32:
            raise self._ids.wrong(
                f"init of shape {list(weights.shape)}, {weights.dtype}; accepted is [{self.rows},"
                f" {self.dim}], torch.float32"
            )
        later, self._init = self._init, lambda ids: weights.detach()[ids.to(weights.device)].cpu()
        for span in checkpoint.spans(self.rows):
            ids = torch.arange(*span)
            self.write(ids, self.read(ids))
        self._init = later

    def _checked(
        self, input: Tensor, offsets: Tensor | None, weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The ids flat on the CPU, and the offsets as int64."""
        if self.mode == "none" or input.dim() == 2:
            if offsets is not None:
                raise self._ids.wrong(
                    f"offsets with input of shape {list(input.shape)} and mode {self.mode!r}; accepted"
                    " is None"
                )
        elif input.dim() != 1 or offsets is None or offsets.dim() != 1:
            shape = None if offsets is None else list(offsets.shape)
            raise self._ids.wrong(
                f"input of shape {list(input.shape)} with offsets of shape {shape}; accepted are [n]"
                " and [bags], or [bags, n] without offsets"
            )
        if weights is not None:
            if self.mode != "sum":
                raise self._ids.wrong(f"per_sample_weights with mode {self.mode!r}; accepted is sum")
            if weights.shape != input.shape or weights.dtype != torch.float32:
                raise self._ids.wrong(
                    f"per_sample_weights of shape {list(weights.shape)}, {weights.dtype}; accepted is"
                    f" {list(input.shape)}, torch.float32"
                )
        return self._ids.checked(input, offsets, last=self.include_last_offset)


class TieredOptimizer(torch.optim.Optimizer):
    """Steps every `TieredEmbeddingBag` of ``module``. Its groups are theirs, in the order of the modules, so
    that schedulers of the learning rate work; what is kept for rows is in the tables' own state.

    Raises:
        UserError: there is none that trains.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.tables = [
            part for part in module.modules() if isinstance(part, TieredEmbeddingBag) and part.rule.optimizer
        ]
        groups = [group for table in self.tables for group in table.rule.groups]
        if not groups:
            raise UserError(
                f"TieredOptimizer: {type(module).__name__} has no TieredEmbeddingBag with an optimizer"
            )
        super().__init__([dict(group) for group in groups], {})
        self.param_groups = groups

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Learning rates and the like; what is kept for rows comes with the tables' own state."""
        groups = self.param_groups
        super().load_state_dict(state_dict)
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.update({name: value for name, value in loaded.items() if name != "params"})
        self.param_groups = groups

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for table in self.tables:
            table.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for table in self.tables:
            table.zero_grad()
