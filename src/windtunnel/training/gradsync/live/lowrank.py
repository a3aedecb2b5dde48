"""PowerSGD (Vogels et al., NeurIPS '19): a gradient as the product of two thin matrices, found by two sums.

One step of power iteration on the sum M of all ranks' matrices, begun where the last one ended (*warm
start*):

    P = sum of M_r Q      all-reduce, then orthonormal columns
    Q = sum of M_r^T P    all-reduce
    M is about P Q^T

Vectors, and matrices that are smaller than their factors, go with the first sum as they are. Every rank
keeps M_r less its share of P Q^T (one over the number of ranks) as its residual: the residuals of all ranks
together are what the sum lacks. NaN or infinity in a matrix makes NaN of it on all ranks, and the next step
begins from the factor of the last good one.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from windtunnel.base.errors import UserError

Shape = tuple[int, ...]
Sides = tuple[int, int] | None


def square(numel: int) -> Shape:
    """The shape nearest to a square that so many elements have, where they come as one row: the most even
    factors, or one vector where there are none that make thin matrices smaller."""
    rows = next((one for one in range(math.isqrt(numel), 0, -1) if numel % one == 0), 1)
    return (rows, numel // rows) if rows > 1 else (numel,)


def nbytes(rank: int, shapes: Sequence[Shape]) -> int:
    """Of both sums, in float32."""
    total = 0
    for shape in shapes:
        sides = _sides(shape, rank)
        total += sum(sides) * min(rank, *sides) if sides else math.prod(shape)
    return 4 * total


def _sides(shape: Shape, rank: int) -> Sides:
    """Rows and columns; None where factors would be no smaller."""
    if len(shape) < 2 or math.prod(shape) == 0:
        return None
    rows, columns = shape[0], math.prod(shape[1:])
    return (rows, columns) if (rows + columns) * min(rank, rows, columns) < rows * columns else None


class LowRank:
    """The gradients of some parameters that lie one behind the other in one row, by PowerSGD.

    ``shapes``: of each parameter by its name. The factors that it begins with come from ``seed`` and the
    name, the same on all ranks; they and all that is summed are float32. In each step all ranks call

        first = low.first(gradient); all-reduce(first)
        second = low.second(gradient, first); all-reduce(second)
        low.add(first, second, out)                           # the sum over ranks
        low.add(first, second, gradient, alpha=-1 / world)    # the residual, in place
    """

    def __init__(self, rank: int, shapes: Mapping[str, Shape], seed: int = 0) -> None:
        self._parts: list[tuple[str, Sides, int, int]] = []
        self._factors: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            sides, numel = _sides(shape, rank), math.prod(shape)
            self._parts.append((name, sides, numel, sides[0] * min(rank, *sides) if sides else numel))
            if sides:
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ seed)
                self._factors[name] = torch.randn(sides[1], min(rank, *sides), generator=generator)

    def first(self, gradient: Tensor) -> Tensor:
        """What is summed first."""
        found = [gradient[:0].float()]
        for name, sides, part, _ in self._split(gradient):
            if sides:
                factor = self._factors[name] = self._factors[name].to(part.device)
                part = (part.float().view(sides) @ factor).view(-1)
            found.append(part.float())
        return torch.cat(found)

    def second(self, gradient: Tensor, first: Tensor) -> Tensor:
        """What is summed next; makes the columns of the ``first`` sum orthonormal, in place."""
        found = [first[:0]]
        for _, sides, part, left in self._split(gradient, first):
            if sides:
                left = left.view(sides[0], -1)
                left.copy_(_orthonormal(left))
                found.append((part.float().view(sides).T @ left).view(-1))
        return torch.cat(found)

    def add(self, first: Tensor, second: Tensor, out: Tensor, alpha: float = 1.0) -> None:
        """Adds ``alpha`` times what both sums stand for to ``out``; the next step begins from them."""
        for name, sides, part, left in self._split(out, first):
            if sides is None:
                part.add_(left, alpha=alpha)
                continue
            factor = self._factors[name]
            right, second = second[: factor.numel()].view_as(factor), second[factor.numel() :]
            part.add_((left.view(sides[0], -1) @ right.T).view(-1), alpha=alpha)
            # a factor of zeros or of NaN would never find anything again
            if 0 < float(right.abs().sum()) < math.inf:
                self._factors[name] = right.clone()

    def _split(self, row: Tensor, first: Tensor | None = None) -> Iterator[tuple[str, Sides, Tensor, Tensor]]:
        """Of each parameter its part of a row, and of the first sum."""
        for name, sides, numel, summed in self._parts:
            left = row if first is None else first
            yield name, sides, row[:numel], left[:summed]
            row, first = row[numel:], None if first is None else first[summed:]

    def state_dict(self) -> dict[str, Tensor]:
        """The factors that the next step begins with, by parameter: the same on all ranks."""
        return {name: one.clone() for name, one in self._factors.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state_dict`; parameters that it lacks begin anew.

        Raises:
            UserError: a factor has another shape.
        """
        for name, mine in self._factors.items():
            if name in state:
                if state[name].shape != mine.shape:
                    raise UserError(
                        f"powersgd: the factor of {name!r} is {tuple(state[name].shape)}, "
                        f"{tuple(mine.shape)} is needed; save and load with the same rank"
                    )
                self._factors[name] = state[name].clone()


def _orthonormal(matrix: Tensor) -> Tensor:
    """Its columns made orthonormal; NaN throughout where it has any, or infinity."""
    taint = matrix.sum() * 0.0
    found: Tensor = torch.linalg.qr(torch.nan_to_num(matrix, 0.0, 0.0, 0.0)).Q
    return found + taint
