"""What the device runs: the kinds of program that HIX took from Rodinia, as functions on tensors."""

import torch
from torch import Tensor


def matmul(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.mm(a, b, out=out)


def stencil(grid: Tensor, out: Tensor, rounds: float = 20) -> None:
    """Hotspot: each cell goes towards the mean of its four neighbours."""
    out.copy_(grid)
    for _ in range(int(rounds)):
        inner = (out[:-2, 1:-1] + out[2:, 1:-1] + out[1:-1, :-2] + out[1:-1, 2:]) / 4
        out[1:-1, 1:-1] = inner


def kmeans(points: Tensor, centres: Tensor, rounds: float = 4) -> None:
    centres.copy_(points[: len(centres)])
    for _ in range(int(rounds)):
        nearest = torch.cdist(points, centres).argmin(1)
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        centres.copy_(sums / nearest.bincount(minlength=len(centres)).clamp(min=1)[:, None])


def bfs(neighbours: Tensor, levels: Tensor) -> None:
    """``neighbours``: (nodes, degree) of each node; levels from node 0, -1 where it is not reached."""
    levels.fill_(-1)
    front, level = torch.zeros(1, dtype=torch.int64, device=levels.device), 0
    while len(front):
        levels[front] = level
        reached = neighbours[front].reshape(-1).unique().long()
        front, level = reached[levels[reached] < 0], level + 1


def backprop(x: Tensor, target: Tensor, first: Tensor, second: Tensor, rounds: float = 4) -> None:
    """Rodinia's network of two layers, trained in place."""
    for _ in range(int(rounds)):
        hidden = torch.sigmoid(x @ first)
        error = hidden @ second - target
        back = (error @ second.T) * hidden * (1 - hidden)
        second -= 0.01 * hidden.T @ error / len(x)
        first -= 0.01 * x.T @ back / len(x)
