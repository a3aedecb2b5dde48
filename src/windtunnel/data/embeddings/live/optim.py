"""Optimizers of tables whose rows move: torch's own, stepped over the rows that are at hand.

A rule is exact when a row's new values depend on that row, its state and its gradients alone, and when a
row's gradients are summed in one order. That is torch's own: backward passes in the order they came, and
``coalesce`` by id. It sorts the ids of the whole batch, from 32,768 on stably, so that a row's gradients are
summed in the order of the batch; of fewer it may take those of a row that comes three times or more in
another order, which hangs on all ids of the batch. So gradients are coalesced by id, never by place, and
what comes out equals one unsharded ``torch.nn.EmbeddingBag(sparse=True)`` bit for bit (a stock one, which is
dense, to float32 rounding), with any of

- ``torch.optim.SGD`` (each occurrence of a row is one subtraction, as torch does it),
- ``torch.optim.Adagrad``, ``torch.optim.SparseAdam``,
- `RowWiseAdagrad`, `RowWiseAdam`: one number a row for the second moment, as FBGEMM's
  ``EXACT_ROWWISE_ADAGRAD`` and ``PARTIAL_ROWWISE_ADAM`` have it; they take sparse gradients of any module.

What would touch rows without a gradient (momentum, weight decay) is refused: it would read every slow row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from windtunnel.base.errors import UserError
from windtunnel.data.embeddings.live.checkpoint import TableFileHeader
from windtunnel.data.embeddings.live.tiers import Tiers

OptimizerFactory = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class _RowWise(torch.optim.Optimizer):
    """One with sparse gradients of two dimensions; ``_update`` has the rows' coalesced gradients.
    ``KEPT``: as in `STATE`."""

    KEPT: dict[str, bool]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is None:
                        continue
                    if not parameter.grad.is_sparse or parameter.dim() != 2:
                        raise UserError(
                            f"{type(self).__name__}: a gradient of shape {list(parameter.grad.shape)}"
                            " is not sparse;"
                            " accepted are those of embeddings with sparse=True"
                        )
                    gradient = parameter.grad.coalesce()
                    state = self.state[parameter]
                    if not state:
                        state["step"] = 0
                        for name, wide in self.KEPT.items():
                            width = parameter.shape[1] if wide else 1
                            state[name] = parameter.new_zeros(len(parameter), width)
                    state["step"] += 1
                    rows, values = gradient._indices()[0], gradient._values()
                    if len(rows):
                        self._update(parameter, rows, values, state, group)
        return loss

    def _update(
        self, parameter: Tensor, rows: Tensor, values: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        raise NotImplementedError


class RowWiseAdagrad(_RowWise):
    """Adagrad with one sum a row: sum += mean(g^2); w -= lr / (sqrt(sum) + eps) * g."""

    KEPT = {"sum": False}  # noqa: RUF012

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-2, eps: float = 1e-8) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    def _update(
        self, parameter: Tensor, rows: Tensor, values: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        sums = state["sum"][rows] + values.pow(2).mean(1, keepdim=True)
        state["sum"][rows] = sums
        parameter.index_add_(0, rows, values * (group["lr"] / (sums.sqrt() + group["eps"])), alpha=-1)


class RowWiseAdam(_RowWise):
    """Adam with one second moment a row, which is the mean over the row; rows without a gradient do not
    decay."""

    KEPT = {"exp_avg": True, "exp_avg_sq": False}  # noqa: RUF012

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    def _update(
        self, parameter: Tensor, rows: Tensor, values: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        (first, second), step = group["betas"], state["step"]
        mean = state["exp_avg"][rows].mul_(first).add_(values, alpha=1 - first)
        square = (
            state["exp_avg_sq"][rows].mul_(second).add_(values.pow(2).mean(1, keepdim=True), alpha=1 - second)
        )
        state["exp_avg"][rows] = mean
        state["exp_avg_sq"][rows] = square
        size = group["lr"] / (1 - first**step)
        parameter.index_add_(
            0, rows, mean / (square.div(1 - second**step).sqrt_() + group["eps"]), alpha=-size
        )


# of each optimizer the names of what it keeps, and whether a row keeps one number of it or as many as weights
STATE: dict[type[torch.optim.Optimizer], dict[str, bool]] = {
    torch.optim.SGD: {},
    torch.optim.Adagrad: {"sum": True},
    torch.optim.SparseAdam: {"exp_avg": True, "exp_avg_sq": True},
    RowWiseAdagrad: RowWiseAdagrad.KEPT,
    RowWiseAdam: RowWiseAdam.KEPT,
}


class TableOptimizer:
    """An optimizer of a table, and what of its state belongs to the table as a whole: its groups and its
    count of steps. ``make``: None for a table that does not train, which has none of this.

    ``groups``: of `optimizer`. ``widths``: floats a row of each state, by name. ``initial``: what each begins
    with. ``sums``: a row's gradients are one by the time it steps; SGD takes one occurrence after the other.

    Raises:
        UserError: an optimizer, or an option of one, that cannot be exact without touching every row.
    """

    def __init__(self, table: str, dim: int, make: OptimizerFactory | None) -> None:
        self._parameter = torch.nn.Parameter(torch.zeros(0, dim))
        self.optimizer = make([self._parameter]) if make else None
        self.groups: list[dict[str, Any]] = self.optimizer.param_groups if self.optimizer else []
        names = STATE.get(type(self.optimizer)) if self.optimizer else {}
        if names is None:
            accepted = ", ".join(kind.__name__ for kind in STATE)
            raise UserError(
                f"table {table!r}: optimizer {type(self.optimizer).__name__} is not exact on some rows;"
                f" accepted are {accepted}"
            )
        group = self.groups[0] if self.groups else {}
        for option in ("momentum", "weight_decay"):
            if group.get(option):
                raise UserError(
                    f"table {table!r}: optimizer option {option} = {group[option]:g} would touch rows"
                    " without a gradient; accepted is 0"
                )
        self.widths = {name: dim if wide else 1 for name, wide in names.items()}
        self.initial = {name: float(group.get("initial_accumulator_value", 0)) for name in names}
        self.sums = not isinstance(self.optimizer, torch.optim.SGD)
        self.reset(0)

    @property
    def steps(self) -> int:
        """Steps done."""
        return int(self._steps)

    def reset(self, steps: int) -> None:
        """Goes on as after this many steps."""
        adagrad = isinstance(self.optimizer, torch.optim.Adagrad)
        self._steps: Any = torch.tensor(float(steps)) if adagrad else steps

    def saved(self, table: str, rows: int) -> TableFileHeader:
        """What a checkpoint of ``table`` is of."""
        kind = type(self.optimizer).__name__ if self.optimizer else ""
        return TableFileHeader(table, rows, self._parameter.shape[1], kind, self.steps, self.widths)

    def step(self, tiers: Tiers, places: Tensor, values: Tensor, *, distinct: bool) -> None:
        """One step over the rows at ``places`` [n] of ``tiers``, whose gradients are ``values`` [n, dim]: of
        ``distinct`` rows, or occurrences in the order of the batch. What has changed goes to the slow tier.

        Raises:
            windtunnel.HostError: it cannot be written there, and stays in memory; the step is done.
        """
        assert self.optimizer is not None
        self._parameter.data = tiers.weight
        with torch.sparse.check_sparse_tensor_invariants(False):  # or torch warns of its own optimizers
            self._parameter.grad = torch.sparse_coo_tensor(
                places[None], values.to(places.device), tiers.weight.shape, is_coalesced=distinct
            )
            state = {"step": self._steps, **tiers.states} if tiers.states else {}
            self.optimizer.state[self._parameter] = state
            self.optimizer.step()
        self._steps = state.get("step", self._steps + 1)
        self._parameter.grad = None
        tiers.touched(places)
        tiers.drop()
