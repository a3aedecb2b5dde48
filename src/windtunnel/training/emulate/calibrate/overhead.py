"""What a training step costs beyond its operators: modules, autograd, the optimiser's Python.

A small transformer of many little operators is trained for a few steps on one thread. Its operators are
recorded and measured by themselves in the same order; what the real phases take longer, spread over their
operators, is the overhead of one operator in that phase.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import nn

from windtunnel.training.emulate.calibrate.measure import measure_operators, on_threads
from windtunnel.training.emulate.calibrate.operators import OperatorRecorder
from windtunnel.training.emulate.graph import Operator
from windtunnel.training.emulate.twin.costs.work import kind_of

WIDTH, HEADS, LAYERS, ROWS = 32, 2, 6, 16


class Block(nn.Module):
    """A transformer block so small that its operators take hardly longer than their dispatch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3 * HEADS, -1).transpose(1, 2).chunk(3, dim=1)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        z: torch.Tensor = self.down(nn.functional.silu(self.up(x)))
        return x + z


def measure_overhead(threads: int = 1, repeats: int = 30) -> dict[str, float]:
    """Host seconds for each operator in ``"forward"``, ``"recompute"``, ``"backward"``, ``"optimizer"`` and
    ``"other"``, beyond the operator itself, and of one ``"view"``, on this machine's CPU."""
    with on_threads(threads):
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        x = torch.rand(1, ROWS, WIDTH)
        state: dict[str, Any] = {}

        def forward() -> None:
            state["loss"] = model(x).sum()

        def backward() -> None:
            optimizer.zero_grad()
            state["loss"].backward()

        phases: dict[str, Callable[[], Any]] = {
            "forward": forward, "backward": backward, "optimizer": optimizer.step,
        }  # fmt: skip
        times: dict[str, list[float]] = {name: [] for name in phases}
        for step in range(repeats):
            for name, run in phases.items():
                begin = perf_counter()
                run()
                if step > 2:
                    times[name].append(perf_counter() - begin)
        recorded: dict[str, list[Operator]] = {}
        for name, run in phases.items():
            with OperatorRecorder() as recorder:
                run()
            recorded[name] = recorder.operators
        view = _view_seconds()
        overhead = {
            name: _each(statistics.median(times[name]), recorded[name], view, threads) for name in phases
        }
    overhead["recompute"] = overhead["forward"]
    overhead["other"] = overhead["forward"]
    overhead["view"] = view
    return overhead


def _each(real: float, operators: list[Operator], view: float, threads: int) -> float:
    """Seconds of one operator beyond what it takes by itself, given that the phase took ``real`` seconds."""
    solid = [op for op in operators if kind_of(op) != "view"]
    profile = measure_operators(solid, "cpu", threads, seconds=2.0)
    alone = sum(profile.exact(op) or 0.0 for op in solid)
    return max(0.0, (real - alone - view * (len(operators) - len(solid))) / len(solid))


def _view_seconds() -> float:
    """Seconds of one view that autograd follows."""
    x = torch.rand(WIDTH, WIDTH, requires_grad=True)
    samples = []
    for _ in range(200):
        begin = perf_counter()
        x.view(-1).view(WIDTH, WIDTH).transpose(0, 1).view(WIDTH, WIDTH, 1)
        samples.append((perf_counter() - begin) / 4)
    return statistics.median(samples)


def small_model() -> nn.Sequential:
    """A transformer whose operators take hardly longer than their dispatch."""
    return nn.Sequential(*[Block() for _ in range(LAYERS)])
